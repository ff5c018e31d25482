"""Constrains outputs: JSON by a schema, a regular expression, one of several texts."""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
        "job": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city", "job"],
    "additionalProperties": False,
}
SENTENCE = "Anna is 34 years old, lives in Paris and works as a baker."


def main() -> None:
    def constrained(**constraint) -> SamplingParams:
        structured = StructuredOutputsParams(**constraint)
        return SamplingParams(temperature=0, max_tokens=128, structured_outputs=structured)

    with LLM() as llm:

        def ask(question: str, **constraint) -> str:
            messages = [{"role": "user", "content": question}]
            [output] = llm.chat(messages, constrained(**constraint), use_tqdm=False)
            return output.outputs[0].text

        print("JSON:", json.loads(ask(f"Write this as JSON: {SENTENCE}", json=PERSON)))
        print("sum:", ask("What is 12 + 30?", regex=r"[0-9]+ \+ [0-9]+ = [0-9]{1,3}"))
        print("choice:", ask("Is the sky blue?", choice=["yes", "no"]))


if __name__ == "__main__":
    main()
