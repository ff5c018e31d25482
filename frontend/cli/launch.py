"""`quire launch`: starts a coding agent on a running server, or prints the command that does.

Must not know: how an agent works beyond its settings, any part of an engine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from string import Template

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.own_files import user_cache
from .parser import Parser
from .table import print_table
from .top import Server

USAGE = "[NAME [--url URL] [--model NAME] [--print]] [-- ARGUMENTS]"
DESCRIPTION = (
    "Starts an agent with the settings that make it use a running Quire server; ARGUMENTS are the "
    "agent's own. Without NAME: lists the agents."
)
KEY = "OPENAI_API_KEY"
UNSAFE = frozenset("\"'\\$`\n")  # could end a text in a setting's syntax


@dataclass(frozen=True)
class Agent:
    """Settings may contain $url (without /v1), $model, $context (tokens), $key and $folder, which
    holds `files`. `arguments` stand before the user's.
    """

    title: str
    install: str
    program: str
    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


# Variables beside the address and the model switch off what would go to other servers: telemetry,
# update checks, lists of models.
AGENTS = {
    "claude": Agent(
        "Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        "claude",
        variables={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "codex": Agent(
        "Codex",
        "npm install -g @openai/codex",
        "codex",
        variables={KEY: "$key"},
        arguments=(
            *("-c", 'model="$model"', "-c", 'model_provider="quire"'),
            *("-c", "model_context_window=$context"),
            "-c",
            'model_providers.quire={name="Quire",base_url="$url/v1",wire_api="responses",'
            f'env_key="{KEY}"}}',
            *("-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"),
        ),
    ),
    "opencode": Agent(
        "opencode",
        "npm install -g opencode-ai",
        "opencode",
        variables={
            KEY: "$key",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_CONFIG": "$folder/opencode.json",
        },
        files={
            "opencode.json": """{
  "model": "quire/$model",
  "small_model": "quire/$model",
  "autoupdate": false,
  "share": "disabled",
  "provider": {
    "quire": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Quire",
      "options": {"baseURL": "$url/v1", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"$model": {"limit": {"context": $context, "output": $context}}}
    }
  }
}
"""
        },
    ),
    "aider": Agent(
        "aider",
        "pip install aider-chat",
        "aider",
        variables={
            "OPENAI_API_BASE": "$url/v1",
            KEY: "$key",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        arguments=(
            *("--model", "openai/$model", "--no-show-model-warnings"),
            *("--no-check-update", "--analytics-disable"),
        ),
    ),
    "continue": Agent(
        "Continue",
        "npm install -g @continuedev/cli",
        "cn",
        variables={
            "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
            "CONTINUE_TELEMETRY_ENABLED": "0",
            "CONTINUE_CLI_AUTO_UPDATED": "1",
        },
        arguments=("--config", "$folder/config.yaml"),
        files={
            "config.yaml": """name: Quire
version: 1.0.0
schema: v1
models:
  - name: "$model"
    provider: openai
    model: "$model"
    apiBase: "$url/v1"
    apiKey: "$key"
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    contextLength: $context
"""
        },
    ),
    "llm": Agent(
        "llm",
        "pip install llm",
        "llm",
        variables={"LLM_USER_PATH": "$folder"},
        files={
            "default_model.txt": "$model",
            "keys.json": '{"quire": "$key"}',
            "extra-openai-models.yaml": """- model_id: "$model"
  model_name: "$model"
  api_base: "$url/v1"
  api_key_name: quire
  supports_tools: true
  supports_schema: true
""",
        },
    ),
}


AFTER_DASHES = ", and give the agent's own arguments after --"


class LaunchParser(Parser):
    def _unknown(self, word: str) -> str:
        kind = "flag" if word.startswith("-") else "argument"
        return f"unknown {kind} {word.split('=')[0]}; see {self.prog} --help-all{AFTER_DASHES}"


def make_parser(argv: list[str]) -> Parser:
    parser = LaunchParser("launch", USAGE, DESCRIPTION, argv)
    add = parser.add
    add("name", "NAME", ", ".join(AGENTS), nargs="?")
    add("--url", "URL", "the server, with or without /v1", "http://127.0.0.1:8000")
    add("--model", "NAME", "one of the server's [its first]")
    add("--api-key", "KEY", f"of the server [${KEY}]")
    add.switch("--print", "print the command with its variables; start nothing")
    return parser


def main(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    own, arguments = argv[:place], argv[place + 1 :]
    args = make_parser(own).parse(own)
    if args.name is None:
        rows = [(name, agent.title, agent.install) for name, agent in AGENTS.items()]
        print_table(("name", "agent", "installed by"), rows)
        return 0
    if args.name not in AGENTS:
        raise InvalidParameterError("NAME", f"must be one of {', '.join(AGENTS)}")
    agent = AGENTS[args.name]
    settings = find_settings(args.url, args.model, args.api_key or os.environ.get(KEY), args.name)
    variables, command = filled(agent, settings)
    is_installed = shutil.which(agent.program) is not None
    write_files(agent, settings)
    if args.print or not is_installed:
        print(shown(variables, [*command, *arguments], settings["key"]))
    if not is_installed:
        print(f"quire launch: {agent.program} is not installed; {agent.install}", file=sys.stderr)
    if args.print or not is_installed:
        return 0 if args.print else 1
    sys.stdout.flush()
    os.execvpe(agent.program, [*command, *arguments], os.environ | variables)


def find_settings(url: str, model: str | None, key: str | None, name: str) -> dict[str, str]:
    """Returns what stands for the $names in an agent's settings. It asks the server for its models.

    Raises ServerError, and InvalidParameterError for a model that it does not have.
    """
    server = Server(url, key)
    cards = msgspec.json.decode(server.ask("/v1/models"))["data"]
    by_name = {card["id"]: card for card in cards}
    model = cards[0]["id"] if model is None else model
    if model not in by_name:
        raise InvalidParameterError("--model", f"must be one of {', '.join(by_name)}")
    settings = {
        "url": server.url,
        "model": model,
        "context": str(by_name[model]["max_model_len"]),
        "key": key or "none",
        "folder": str(user_cache() / "agents" / name),
    }
    for what, text in settings.items():
        if UNSAFE & set(text):
            raise InvalidParameterError(what, "must not contain quotes, \\, $ or line breaks")
    return settings


def filled(agent: Agent, settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the agent's variables, and its command."""

    def fill(text: str) -> str:
        return Template(text).substitute(settings)

    variables = {name: fill(text) for name, text in agent.variables.items()}
    return variables, [agent.program, *map(fill, agent.arguments)]


def write_files(agent: Agent, settings: dict[str, str]) -> None:
    """Writes the agent's files. Only their owner can read those that may contain the key."""
    for name, text in agent.files.items():
        os.makedirs(settings["folder"], mode=0o700, exist_ok=True)
        path = os.path.join(settings["folder"], name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(Template(text).substitute(settings))


def shown(variables: dict[str, str], command: list[str], key: str) -> str:
    """Returns the command for a shell. A key is not printed."""

    def value(text: str) -> str:
        return f'"${KEY}"' if text == key != "none" else shlex.quote(text)

    lines = [f"{name}={value(text)}" for name, text in variables.items()]
    return " \\\n  ".join([*lines, shlex.join(command)])
