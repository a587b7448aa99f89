"""Chat templates of our own in the styles of published targets: tools, calls, results and reasoning."""

QWEN3 = """\
{%- macro turn(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}{{ turn('system') }}{{ 'Tools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'Call one as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ turn('user' if m.role == 'tool' else m.role) }}
{%- if m.role == 'tool' %}{{ '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{-  (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

R1 = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1] }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant><think>\\n' }}{% endif %}"""

LLAMA3 = """\
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{{ 'Answer {"name": ..., "parameters": ...} for one of ' + (tools | tojson) + '\\n' }}
{%- endif %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{% if loop.last and tools %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_CALLS][{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}]' }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
