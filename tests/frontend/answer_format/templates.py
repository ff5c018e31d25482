"""Small chat templates with the markers and turn structure of real models, by tool-call format."""

from __future__ import annotations

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% "
    "endfor %}HINT{{ '<|im_end|>\n' }}{% endif %}"
)
TURNS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' and m.reasoning_content is defined %}\
{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif -%}
{%- if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}CALLS{% endif %}\
{{ '<|im_end|>\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EACH = "{% for c in m.tool_calls %}ONE{% endfor %}"
LISTED = (
    '{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "KEY": \' + '
    "ARGUMENTS + '}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
)
AS_JSON = "c.function.arguments | tojson"


def chatml(calls: str, hint: str = "") -> str:
    """`calls` writes m.tool_calls; `hint` is rendered where the tools are listed."""
    return TOOLS.replace("HINT", hint) + TURNS.replace("CALLS", calls)


def each(one: str) -> str:
    """`one` writes the call c."""
    return EACH.replace("ONE", one)


def listed(before: str, after: str, key: str = "arguments", arguments: str = f"({AS_JSON})") -> str:
    return before + LISTED.replace("KEY", key).replace("ARGUMENTS", arguments) + after


def tagged(name: str, argument: str, end: str) -> str:
    loop = "{% for k, v in c.function.arguments | items %}{{ ARGUMENT }}{% endfor %}".replace(
        "ARGUMENT", argument
    )
    return each("{{ NAME }}".replace("NAME", name) + loop + end)


VALUE = "(v if v is string else v | tojson)"
PYTHON_CALL = (
    "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k + '=' + (v | "
    "tojson) }}{% if not loop.last %}, {% endif %}{% endfor %})"
)
PYTHON_LIST = each(PYTHON_CALL + "{% if not loop.last %}, {% endif %}")

# As gpt-oss' own: the tools in the developer's message, one call per message, reasoning only before
# calls, and tojson for results of tools.
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}\
{%- set first = messages[0] if messages[0].role in ('system', 'developer') %}\
{%- if first or tools %}{{ '<|start|>developer<|message|>' }}\
{%- if first %}{{ '# Instructions\n\n' + first.content }}{% endif %}\
{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}\
{%- set last = namespace(name=none) %}\
{%- for m in messages %}\
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}\
{%- elif m.role == 'tool' %}{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>' }}\
{{- 'commentary<|message|>' + (m.content | tojson) + '<|end|>' }}\
{%- elif m.role == 'assistant' and 'tool_calls' in m %}\
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking, not both') }}\
{%- elif m.content or m.thinking %}\
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}\
{%- endif %}{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}\
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}\
{{- (call.arguments | tojson) + '<|call|>' }}\
{%- elif m.role == 'assistant' %}\
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}\
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

TEMPLATES = {
    "harmony": HARMONY,
    "hermes": chatml(
        each(
            '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + ('
            + AS_JSON
            + ") + '}\n</tool_call>' }}"
        ),
        "Answer within <tool_call></tool_call>.",
    ),
    "qwen3_coder": chatml(
        tagged(
            "'\n<tool_call>\n<function=' + c.function.name + '>\n'",
            f"'<parameter=' + k + '>\n' + {VALUE} + '\n</parameter>\n'",
            "{{ '</function>\n</tool_call>' }}",
        )
    ),
    "seed_oss": chatml(
        tagged(
            "'<seed:tool_call>\n<function=' + c.function.name + '>\n'",
            f"'<parameter=' + k + '>' + {VALUE} + '</parameter>\n'",
            "{{ '</function>\n</seed:tool_call>' }}",
        )
    ),
    "glm45": chatml(
        tagged(
            "'\n<tool_call>' + c.function.name + '\n'",
            f"'<arg_key>' + k + '</arg_key>\n<arg_value>' + {VALUE} + '</arg_value>\n'",
            "{{ '</tool_call>' }}",
        )
    ),
    "minimax_m2": chatml(
        "{{ '<minimax:tool_call>\n' }}"
        + tagged(
            "'<invoke name=\"' + c.function.name + '\">\n'",
            f"'<parameter name=\"' + k + '\">' + {VALUE} + '</parameter>\n'",
            "{{ '</invoke>\n' }}",
        )
        + "</minimax:tool_call>"
    ),
    "deepseek_v3": chatml(  # its own template puts the arguments after a text
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + each(
            "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n"
            "```json\n' "
            "+ c.function.arguments + '\n```<｜tool▁call▁end｜>\n' }}"
        )
        + "{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "deepseek_v31": chatml(
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + each(
            "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + "
            "c.function.arguments + "
            "'<｜tool▁call▁end｜>' }}"
        )
        + "{{ '<｜tool▁calls▁end｜>' }}"
    ),
    "kimi_k2": chatml(
        "<|tool_calls_section_begin|>"
        + each(
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ "
            "c.function.arguments | tojson }}{% endif %}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>"
    ),
    "mistral": chatml(
        "[TOOL_CALLS] ["
        + each(
            "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id[-9:] + '\"}' }}{% if not "
            "loop.last %}, {% endif %}"
        )
        + "]"
    ),
    "mistral_v11": chatml(
        each("{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (" + AS_JSON + ") }}")
    ),
    "phi4_mini": chatml(
        "<|tool_call|>[" + listed("", "]<|/tool_call|>", arguments="c.function.arguments"),
        "<|tool|><|/tool|>",
    ),
    "granite": chatml("<|tool_call|>[" + listed("", "]")),
    "lfm2": chatml("<|tool_call_start|>[" + PYTHON_LIST + "]<|tool_call_end|>"),
    "olmo3": chatml(
        "{{ '<function_calls>\n' }}" + each(PYTHON_CALL + "{{ '\n' }}") + "</function_calls>"
    ),
    "tool_calls": chatml("<tool_calls>[" + listed("", "]</tool_calls>")),
    "nemotron": chatml("<TOOLCALL>[" + listed("", "]</TOOLCALL>")),
    "internlm": chatml(
        each(
            "<|action_start|><|plugin|>"
            + listed("", "<|action_end|>", key="parameters").replace(
                "for c in m.tool_calls", "for c in [c]"
            )
        )
    ),
    "pythonic": chatml(
        "[" + PYTHON_LIST + "]", "Use [func_name1(params_name1=params_value1), func_name2(params)]"
    ),
    "llama3_json": chatml(
        each(
            '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' + ('
            + AS_JSON
            + ") + '}' }}{% if not loop.last %}; {% endif %}"
        ),
        'Respond in the format {{ \'{"name": function name, "parameters": dictionary of argument '
        "name and its value}' }}.",
    ),
}
