"""What to do with a running stack: commands that work as they stand. Pure."""

import json
import shlex
from collections.abc import Mapping

from intellect.places import STATE_DIR_DEFAULT, places
from intellect.stack.plan import LOOPBACK, StackOptions

_QUESTION = "What is the capital of France?"
_KEY_VARIABLE = "INTELLECT_API_KEY"
_ADMIN_PORT_DEFAULT = 8001


def base_url(options: StackOptions) -> str:
    host = LOOPBACK if options.host in ("0.0.0.0", "") else "[::1]" if options.host == "::" else options.host
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{options.port}/v1"


def guide(options: StackOptions, *, seconds: float, environ: Mapping[str, str], command: str) -> str:
    """The text that `intellect up` prints when every replica serves.

    `environ` is the user's environment, `command` is how a shell of theirs finds `intellect`.
    """
    replicas = "1 replica" if options.replicas == 1 else f"{options.replicas} replicas"
    admin = f"http://{LOOPBACK}:{options.admin_port}"
    return f"""
Ready after {seconds:.0f} s: {options.served_name} on {replicas}, at {base_url(options)}

Ask it:

{curl_line(options, environ, stream=False)}

Ask it and see the answer grow:

{curl_line(options, environ, stream=True)}

The same in Python:

{python_snippet(options, environ)}
Admin API and metrics: {admin}/admin/replicas  {admin}/metrics
Logs: {options.logs}

Swap in a new checkpoint while it serves:

{_swap_lines(options, admin, shlex.quote(command))}

Ctrl-C stops everything.
"""


def curl_line(options: StackOptions, environ: Mapping[str, str], *, stream: bool) -> str:
    body: dict[str, object] = {
        "model": options.served_name,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
    }
    if stream:
        body["stream"] = True
    key = _shell_key(options, environ)
    authorization = f' -H "Authorization: Bearer {key}"' if key else ""
    return (
        f"curl -s{'N' if stream else ''} {base_url(options)}/chat/completions -H 'content-type: application/json'"
        f"{authorization} -d {shlex.quote(json.dumps(body))}"
    )


def python_snippet(options: StackOptions, environ: Mapping[str, str]) -> str:
    if _is_in_environment(options, environ):
        imports, key = "import os\n\n", f'os.environ["{_KEY_VARIABLE}"]'
    else:
        imports, key = "", json.dumps(options.api_keys[0] if options.api_keys else "unused")
    return f"""{imports}from openai import OpenAI

client = OpenAI(base_url="{base_url(options)}", api_key={key})
answer = client.chat.completions.create(
    model={json.dumps(options.served_name)},
    messages=[{{"role": "user", "content": {json.dumps(_QUESTION)}}}],
    temperature=0,
)
print(answer.choices[0].message.content)
"""


def _swap_lines(options: StackOptions, admin: str, command: str) -> str:
    model = shlex.quote(options.served_name)
    store = options.places.store
    store_flag = "" if store == places(STATE_DIR_DEFAULT).store else f" --store {shlex.quote(str(store))}"
    admin_flag = "" if options.admin_port == _ADMIN_PORT_DEFAULT else f" --admin {admin}"
    return (
        f"{command} checkpoint publish FOLDER --model {model} --version v1{store_flag}\n"
        f"{command} checkpoint swap v1 --model {model}{admin_flag}"
    )


def _shell_key(options: StackOptions, environ: Mapping[str, str]) -> str | None:
    if _is_in_environment(options, environ):
        return f"${_KEY_VARIABLE}"
    return options.api_keys[0] if options.api_keys else None


def _is_in_environment(options: StackOptions, environ: Mapping[str, str]) -> bool:
    """Whether the user's own variable is exactly the key: then the key itself need not be printed."""
    return bool(options.api_keys) and environ.get(_KEY_VARIABLE) == options.api_keys[0]
