// Quire for the list of local apps of the Hugging Face hub: an entry of LOCAL_APPS in
// packages/tasks/src/local-apps.ts of huggingface.js, where the imports below are not needed. Not
// proposed there yet.
import type { LocalApp, LocalAppSnippet, ModelData } from "@huggingface/tasks";

const isQuireModel = (model: ModelData): boolean =>
	!!model.gguf?.context_length ||
	(model.tags.includes("transformers") &&
		(model.pipeline_tag === "text-generation" || model.pipeline_tag === "image-text-to-text"));

const snippetQuire = (model: ModelData): LocalAppSnippet[] => {
	// the hub replaces the placeholder by Q4_K_M or another tag that the repository has
	const name = `${model.id}${model.gguf ? ":{{QUANT_TAG}}" : ""}`;
	const setup = ["# Install Quire from pip:", "pip install quire-engine"].join("\n");
	const call = [
		"# Call the server using curl (OpenAI-compatible API):",
		"curl http://localhost:8000/v1/chat/completions \\",
		"\t-H 'Content-Type: application/json' \\",
		`\t-d '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'`,
	].join("\n");
	return [
		{ title: "Chat in the terminal", setup, content: `quire chat ${name}` },
		{
			title: "Serve OpenAI's API and a page",
			setup,
			content: [`# Start the server:\nquire serve ${name}`, call],
		},
	];
};

export const quire: LocalApp = {
	prettyLabel: "Quire",
	docsUrl: "@HOMEPAGE@",
	mainTask: "text-generation",
	displayOnModelPage: isQuireModel,
	snippet: snippetQuire,
};
