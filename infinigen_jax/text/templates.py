"""Chat templates of model folders, rendered in Jinja's sandbox."""

import datetime
import functools
import json
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError

if TYPE_CHECKING:
    import jinja2  # its import takes a tenth of a second


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    special_tokens: dict[str, str],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> str:
    """Render a chat template as `transformers` does, with a prompt for the next answer.

    Args:
        special_tokens: variables of the template, such as `bos_token`.
        tools: functions that the model may call, in OpenAI's format.
        variables: further variables of the template, such as `enable_thinking`. They may replace
            all but the messages and the tools.

    Raises:
        InputError: if the template is invalid or refuses the messages.
    """
    others = {"documents": None, "add_generation_prompt": True, **special_tokens}
    inputs = others | (variables or {}) | {"messages": messages, "tools": tools}
    try:
        return _compiled(template).render(inputs)
    except Exception as error:  # a template may raise anything
        reason = (str(error) or type(error).__name__)[:1000]
        raise InputError(
            f"the chat template refuses this ({reason}); give another as `chat_template`"
        ) from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> "jinja2.Template":
    """Compile a template, with the functions and blocks that transformers' templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Block `{% generation %}`, which marks an answer for training and changes nothing here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox.from_string(template)
