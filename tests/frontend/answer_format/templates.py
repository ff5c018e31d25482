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

DSML = (
    "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'SECTION>\n' }}"
    + each(
        "{{ '<' + dsml + 'invoke name=\"' + c.function.name + '\">\n' }}"
        "{%- for k, v in c.function.arguments | items %}{{ '<' + dsml + 'parameter name=\"' + k + "
        "'\" string=\"' + ('true' if v is string else 'false') + '\">' + VALUE + '</' + dsml + "
        "'parameter>\n' }}{% endfor %}{{ '</' + dsml + 'invoke>\n' }}"
    ).replace("VALUE", VALUE)
    + "{{ '</' + dsml + 'SECTION>' }}"
)
GEMMA_VALUE = """\
{%- macro value(v) -%}
{%- if v is string -%}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{{ '{' }}{% for k, w in v | items %}{{ k }}:{{ value(w) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif v is sequence -%}{{ '[' }}{% for w in v %}{{ value(w) }}{% if not loop.last %},{% endif %}
{%- endfor %}{{ ']' }}
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
"""

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
    "glm47": chatml(
        tagged(
            "'<tool_call>' + c.function.name",
            f"'<arg_key>' + k + '</arg_key><arg_value>' + {VALUE} + '</arg_value>'",
            "{{ '</tool_call>' }}",
        )
    ),
    "deepseek_v32": chatml("{{ '\n\n' }}" + DSML.replace("SECTION", "function_calls")),
    "deepseek_v4": chatml("{{ '\n\n' }}" + DSML.replace("SECTION", "tool_calls")),
    # its own template sorts the keys
    "gemma4": GEMMA_VALUE
    + chatml(
        each(
            "{{ '<|tool_call>call:' + c.function.name + '{' }}"
            "{%- for k, v in c.function.arguments | items %}{{ k }}:{{ value(v) }}"
            "{% if not loop.last %},{% endif %}{% endfor %}{{ '}<tool_call|>' }}"
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
    "minimax_m3": (
        "{% set ns = ']<]minimax[>[' %}{% macro xml(v) %}{% if v is mapping %}{% for k, w in v | "
        "items %}{{ ns + '<' + k + '>' }}{{ xml(w) }}{{ ns + '</' + k + '>' }}{% endfor %}"
        "{% elif v is iterable and v is not string %}{% for w in v %}{{ ns + '<item>' }}{{ xml(w) "
        "}}{{ ns + '</item>' }}{% endfor %}{% else %}{{ v if v is string else v | tojson }}"
        "{% endif %}{% endmacro %}"
        + chatml(
            "{{ ns + '<tool_call>\n' }}"
            + each(
                "{{ ns + '<invoke name=\"' + c.function.name + '\">' }}"
                "{{ xml(c.function.arguments) }}{{ ns + '</invoke>\n' }}"
            )
            + "{{ ns + '</tool_call>' }}"
        )
    ),
    "kimi_k3": (
        "{% set o, x, s = '<|open|>', '<|close|>', '<|sep|>' %}"
        + chatml(
            "{{ o + 'tools' + s }}{% for c in m.tool_calls %}"
            "{{ o + 'call tool=\"' + c.function.name + '\" index=\"' }}"
            "{{ loop.index | string + '\"' }}"
            "{{ s }}{% for k, v in c.function.arguments | items %}{{ o + 'argument key=\"' + k + "
            "'\" type=\"' + ('string' if v is string else 'boolean' if v is boolean else 'number' "
            "if v is number else 'object' if v is mapping else 'array') + '\"' + s + "
            f"{VALUE} + x + 'argument' + s }}}}{{% endfor %}}{{{{ x + 'call' + s }}}}{{% endfor %}}"
            "{{ x + 'tools' + s }}"
        )
    ),
    "hy_v3": "{% set kind = ':opensource' %}"
    + chatml(
        "{{ '<tool_calls{}>\n'.format(kind) }}"
        + tagged(
            "'<tool_call{}>'.format(kind) + c.function.name + '<tool_sep{}>\n'.format(kind)",
            "'<arg_key{}>'.format(kind) + k + '</arg_key{}>\n<arg_value{}>'.format(kind, kind) + "
            f"{VALUE} + '</arg_value{{}}>\n'.format(kind)",
            "{{ '</tool_call{}>\n'.format(kind) }}",
        )
        + "{{ '</tool_calls{}>'.format(kind) }}"
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
    "cohere": chatml(
        "{{ '<|START_ACTION|>[\n' }}"
        + each(
            '{{ \'    {"tool_call_id": "\' + c.id + \'", "tool_name": "\' + c.function.name + \'", '
            '"parameters": \' + (' + AS_JSON + ") + '}' }}{% if not loop.last %},{% endif %}"
            "{{ '\n' }}"
        )
        + "{{ ']<|END_ACTION|>' }}"
    ),
    "apertus": chatml(
        "<|tools_prefix|>["
        + each(
            "{{ '{\"' + c.function.name + '\": ' + ("
            + AS_JSON
            + ") + '}' }}{% if not loop.last %}, {% endif %}"
        )
        + "]<|tools_suffix|>"
    ),
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


def stock(hint: str, prompt: str) -> str:
    """Return a template that lists tools after `hint` and begins the answer with `prompt`."""
    return (
        (
            "{% if tools %}HINT{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ "
            "m.role }}: {{ "
            "m.content }}\n{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"
        )
        .replace("HINT", hint)
        .replace("PROMPT", prompt)
    )


def switched(on: str, off: str, name: str = "enable_thinking", default: str = "true") -> str:
    return (
        "{% if NAME | default(DEFAULT) %}{{ 'ON' }}{% else %}{{ 'OFF' }}{% endif %}".replace(
            "NAME", name
        )
        .replace("DEFAULT", default)
        .replace("ON", on)
        .replace("OFF", off)
    )


XML_HINT = (
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n</function>\n</tool_call>\n"
)
DSML_HINT = (
    "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}SECTION>\n<{{ dsml_token }}invoke "
    'name="$NAME">\n<{{ dsml_token }}parameter name="$KEY" string="true|false">$VALUE</{{ '
    "dsml_token }}parameter>\n</{{ dsml_token }}invoke>\n</{{ dsml_token }}SECTION>\n"
)
THINK = "{# <think> and </think> around the thoughts of earlier turns #}"

# By family: (template with the marks and the beginnings of answers of the models' own, its variable
# that switches reasoning, the call f(a="x", n=2) as the model writes it, format, reasoning format).
STOCK = {
    "Qwen3.5": (
        stock(
            XML_HINT,
            switched(
                "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            ),
        ),
        "enable_thinking",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "qwen3_coder",
        "think",
    ),
    "Nemotron 3": (
        stock(
            XML_HINT,
            switched("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think></think>"),
        ),
        "enable_thinking",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "qwen3_coder",
        "think",
    ),
    "GLM-4.7": (
        stock(
            "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
            "<arg_value>{arg-value-1}</arg_value>...</tool_call>",
            switched("<|assistant|><think>", "<|assistant|></think>"),
        ),
        "enable_thinking",
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>n</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        "glm47",
        "think",
    ),
    "MiniMax M2": (
        stock(
            "{% set begin = '<minimax:tool_call>' %}{{ begin }}",
            THINK + "{{ ']~b]ai\n<think>\n' }}",
        ),
        None,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n'
        '<parameter name="n">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "minimax_m2",
        "think",
    ),
    "Gemma 4": (
        stock(
            "{# <|tool_call>call: <|channel>thought <channel|> #}",
            switched(
                "<|turn>model\n", "<|turn>model\n<|channel>thought\n<channel|>", default="false"
            ),
        ),
        "enable_thinking",
        '<|tool_call>call:f{a:<|"|>x<|"|>,n:2}<tool_call|>',
        "gemma4",
        "gemma4",
    ),
    "DeepSeek V3.1": (
        stock(
            "<｜tool▁calls▁begin｜>",
            switched("<｜Assistant｜><think>", "<｜Assistant｜></think>", "thinking"),
        ),
        "thinking",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x", "n": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31",
        "think",
    ),
    "DeepSeek V3.2": (
        stock(
            DSML_HINT.replace("SECTION", "function_calls"),
            switched("<｜Assistant｜><think>", "<｜Assistant｜></think>"),
        ),
        "enable_thinking",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "deepseek_v32",
        "think",
    ),
    "DeepSeek V4": (
        stock(
            DSML_HINT.replace("SECTION", "tool_calls"),
            switched("<｜Assistant｜><think>", "<｜Assistant｜></think>"),
        ),
        "enable_thinking",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "deepseek_v4",
        "think",
    ),
    "Kimi K2, the first template": (
        stock("<|im_system|>tool_declare<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"),
        None,
        "<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:0 "
        '<|tool_call_argument_begin|> {"a": "x", "n": 2} <|tool_call_end|> '
        "<|tool_calls_section_end|>",
        "kimi_k2",
        None,
    ),
    "Kimi K2 Thinking": (
        stock(THINK + "<|tool_calls_section_begin|>", "<|im_assistant|>assistant<|im_middle|>"),
        None,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": "x", "n": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "kimi_k2",
        "think",
    ),
    "LFM2": (
        stock("<|im_start|>List of tools: <|tool_list_start|>", "<|im_start|>assistant\n"),
        None,
        "<|tool_call_start|>[f(a='x', n=2)]<|tool_call_end|>",
        "lfm2",
        None,
    ),
    "LFM2.5": (
        stock(THINK + "<|im_start|>system\nList of tools: [", "<|im_start|>assistant\n"),
        None,
        '<|tool_call_start|>[f(a="x", n=2)]<|tool_call_end|>',
        "lfm2",
        "think",
    ),
    "Granite 3.3": (
        stock(
            "respond only with "
            "<|tool_call|> followed by a JSON list of tools used. Write your thoughts "
            "between <think></think> and your response between <response></response>.",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        None,
        '<tool_call>[{"name": "f", "arguments": {"a": "x", "n": 2}}]',
        "granite",
        "granite33",
    ),
    "Hunyuan 3": (
        "{% set kind = ':opensource' %}"
        + stock(
            "{{ '<tool_calls{}><tool_sep{}></think{}>'.format(kind, kind, kind) }}",
            switched("<|Assistant|><think:opensource>", "<think:opensource></think:opensource>"),
        ),
        "enable_thinking",
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n"
        "<arg_key:opensource>a</arg_key:opensource>\n<arg_value:opensource>x"
        "</arg_value:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n"
        "<arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "hy_v3",
        "hy_v3",
    ),
    "Command R7B": (
        stock(
            "write <|START_THINKING|>, a plan and <|END_THINKING|>, then <|START_ACTION|> and a "
            "list of JSON-formatted tool calls, or <|START_RESPONSE|> and <|END_RESPONSE|>",
            "<|CHATBOT_TOKEN|>" + switched("", "<|START_THINKING|><|END_THINKING|>"),
        ),
        "enable_thinking",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x", '
        '"n": 2}}\n]<|END_ACTION|>',
        "cohere",
        "cohere",
    ),
    "Command A, later": (
        stock(
            "{# <|END_THINKING|><|START_ACTION|> <|START_TEXT|> <|END_TEXT|> #}",
            "<|CHATBOT_TOKEN|>"
            + switched("<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>", "reasoning"),
        ),
        "reasoning",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x", '
        '"n": 2}}\n]<|END_ACTION|>',
        "cohere",
        "cohere_text",
    ),
    "Apertus": (
        stock("{# <|inner_prefix|> <|inner_suffix|> <|tools_prefix|> #}", "<|assistant_start|>"),
        None,
        '<|tools_prefix|>[{"f": {"a": "x", "n": 2}}]<|tools_suffix|>',
        "apertus",
        "apertus",
    ),
    "Granite 4": (
        stock(
            "within <tool_call></tool_call> XML tags:\n<tool_call>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        None,
        '<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": 2}}\n</tool_call>',
        "hermes",
        None,
    ),
}
