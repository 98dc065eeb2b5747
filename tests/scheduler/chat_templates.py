"""Chat templates of these tests' own, with the constructs that templates of the Qwen families use."""

JSON_CALLS = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions, one a line, between tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set found = namespace(question=-1) %}
{%- for message in messages[::-1] %}
    {%- set at = messages|length - 1 - loop.index0 %}
    {%- if found.question < 0 and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set found.question = at %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|start|>assistant\\n' }}
        {%- if thought and loop.index0 > found.question %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{ '\\n' }}{% endif %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Tools and calls as JSON; the model opens its thinking itself, unless `enable_thinking` is false."""

XML_CALLS = """\
{%- macro rest(of, known) %}
    {%- for key, value in of.items() if key not in known %}
        {{- '\\n<' + key + '>' }}
        {%- set plain = not (value is mapping or (value is sequence and value is not string)) %}
        {{- value | string if plain else value | tojson | safe }}
        {{- '</' + key + '>' }}
    {%- endfor %}
{%- endmacro %}
{%- set first = messages[0].content if messages[0].role == 'system' else none %}
{%- set messages = messages[1:] if first is not none else messages %}
{%- if first is not none or tools %}
    {{- '<|start|>system\\n' + (first or '') }}
    {%- for tool in tools or [] %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
        {%- for name, schema in (tool.parameters or {}).get('properties', {}) | items %}
            {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
            {{- '\\n<type>' ~ schema.type ~ '</type>' if schema.type is defined }}
            {{- rest(schema, ['type']) }}{{ '\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {%- if tools %}
        {{- '\\nCall one so:\\n<tool_call>\\n<function=NAME>\\n<parameter=P>\\nVALUE\\n</parameter>\\n' }}
        {{- '</function>\\n</tool_call>' }}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable %}
        {{- '<|start|>assistant\\n' + (message.content | trim) }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- set plain = not (value is mapping or (value is sequence and value is not string)) %}
                {{- value | string if plain else value | tojson }}{{ '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>user' if loop.previtem is not defined or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {{- '<|end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role in ['user', 'assistant', 'system'] %}
        {{- '<|start|>' + message.role + '\\n' + message.content | trim + '<|end|>\\n' }}
    {%- else %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}
"""
"""Tools and calls as XML, arguments untyped; the prompt opens the thinking, unless `enable_thinking` is false."""
