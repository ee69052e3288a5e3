"""What a person does on the page, in headless Chromium: a step for each promise, on a phone and a desktop,
dark and light. `run.py` starts it, in an environment that has playwright.

    python browser.py simulated URL PID     every step; PID: of the `headrace up` that serves URL
    python browser.py real URL PICTURE ID   a real model, and a picture; ID: of a request that was paused
    python browser.py tenant URL KEY        what a tenant's key shows

A line for each step: what was seen, or FAILED and why. The exit status is the number of failed steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, Page, Request, Route, sync_playwright

CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 60_000
SIZES = {"desktop": (1280, 720), "phone": (360, 740)}
TICKS_MS = 4_500  # two refreshes of the page
STREAM = "**/v1/chat/completions"
IGNORED = "Failed to load resource"  # what Chromium logs of a refused or a lost request
MARKDOWN = """# A title

Words in *italics* and **bold**, `code`, a [link](https://example.com/) and a [bad one](javascript:pwned=1).

1. one
2. two

```python
def greet(name: str) -> str:
    return f"Hello, {name}, in a line of code that is longer than any phone is wide"
```

| tier | where |
|---|---|
| L1 | DRAM |

<img src=x onerror="window.pwned = 1"><script>window.pwned = 1</script> 5 &lt; 6
![a picture](https://evil.example/x.png)

""" + "\n\n".join(f"Paragraph {n} of a long answer." for n in range(12))


class Visit:
    """One person at the page: a window of one size and scheme."""

    def __init__(
        self, browser: Browser, url: str, size: str, scheme: str, pid: int = 0, *, opened: bool = True
    ) -> None:
        width, height = SIZES[size]
        phone = size == "phone"
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, is_mobile=phone, has_touch=phone
        )
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.name, self.url, self.pid, self.phone = f"{size} {scheme}", url, pid, phone
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.cdp: CDPSession = self.context.new_cdp_session(self.page)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.sent: list[dict[str, object]] = []  # bodies of chats
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._on_request)
        if opened:
            self.open()

    def _on_request(self, request: Request) -> None:
        self.hosts.add(request.url.split("/")[2])
        if request.url.endswith("/v1/chat/completions"):
            self.sent.append(json.loads(request.post_data or ""))

    def open(self, fragment: str = "") -> None:
        """Load the page; the model is there."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/{fragment}")
        self.page.locator("#model option").first.wait_for(state="attached")

    def picture(self, name: str) -> None:
        """A picture of the window, for a look at it."""
        if folder := os.environ.get("PICTURES"):
            self.page.screenshot(path=f"{folder}/{self.name.replace(' ', '_')}_{name}.png")

    # ---- what a person does ---------------------------------------------------------------------

    def chats(self) -> None:
        """The list of chats is in sight."""
        if self.phone and self.page.locator("body.side-open").count() == 0:
            self.page.locator("#side-toggle").click()

    def new_chat(self) -> None:
        self.chats()
        self.page.locator("#new").click()

    def go_to(self, title: str) -> None:
        self.chats()
        self.page.locator("#chats .chat", has_text=title).click()

    def longest(self, tokens: int) -> None:
        self.page.locator("#max_tokens").fill(str(tokens))
        self.page.locator("#max_tokens").blur()

    def ask(self, text: str, tokens: int) -> None:
        self.longest(tokens)
        self.page.locator("#text").fill(text)
        self.page.locator("#send").click()

    def await_answer(self) -> None:
        self.page.locator("#send:visible").wait_for()

    def answers(self, text: str, tokens: int = 12) -> None:
        self.ask(text, tokens)
        self.await_answer()

    def stub(self, text: str) -> None:
        """The next chat gets this answer."""
        pieces = [text[i : i + 9] for i in range(0, len(text), 9)]
        chunks = [
            {"id": "stub", "choices": [{"delta": {"content": piece}}], "usage": {"completion_tokens": n}}
            for n, piece in enumerate(pieces, 1)
        ]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"

        def fulfil(route: Route) -> None:
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        self.page.route(STREAM, fulfil, times=1)

    def send_a_wrong_request(self) -> None:
        """One that the gateway refuses, beside those of the person."""
        self.page.evaluate(
            """fetch("/v1/chat/completions", {
              method: "POST", body: '{"messages": 1}', headers: {"content-type": "application/json"},
            })"""
        )

    # ---- what a person sees ---------------------------------------------------------------------

    @property
    def answer(self) -> str:
        return self.page.locator(".answer").last.inner_text()

    @property
    def draft(self) -> str:
        return self.page.locator("#text").input_value()

    @property
    def note(self) -> str:
        return self.page.locator(".turn > .note").last.inner_text()

    def growing(self, than: int = 0) -> str:
        """The answer, once it is longer."""
        self.page.wait_for_function(
            "least => (document.querySelector('.turn:last-child .answer')?.textContent.length ?? 0) > least",
            arg=than,
        )
        return self.answer

    def fits(self) -> None:
        """Nothing is wider than the window, but for boxes that scroll by themselves."""
        found = self.page.evaluate(
            """() => {
              const wide = [...document.querySelectorAll("body *")].filter((element) => {
                const box = element.getBoundingClientRect();
                return box.width && box.right > innerWidth + 1 && !element.closest("pre, .scrolls");
              });
              const names = wide.map((element) => element.tagName + "#" + element.id);
              return [document.documentElement.scrollWidth - innerWidth, names];
            }"""
        )
        assert found == [0, []], found


# ---- the chat ----------------------------------------------------------------------------------------


def limit_is_shown(v: Visit) -> str:
    shown = v.page.locator("#max_tokens").input_value()
    v.page.locator("#text").fill("Hello")
    v.page.locator("#text").press("Enter")
    v.growing()
    v.page.locator("#stop").click()
    v.await_answer()
    assert (shown, v.sent[-1]["max_tokens"]) == ("2048", 2048), (shown, v.sent[-1])
    v.page.locator("#max_tokens").fill("")
    v.page.locator("#max_tokens").blur()
    assert v.page.locator("#max_tokens").input_value() == "2048", "an empty field has its default again"
    return f"the field and the request have {shown}"


def figures_are_below_an_answer(v: Visit) -> str:
    v.new_chat()
    v.answers("What is NATS?", 12)
    figures = v.page.locator(".foot span").last.inner_text()
    assert re.fullmatch(r"12 tokens · [\d.]+ tokens/s · first token after [\d.]+ m?s", figures), figures
    assert "cut at max tokens" in v.note, v.note
    return figures


def markdown_is_shown_and_no_html(v: Visit) -> str:
    v.stub(MARKDOWN)
    v.answers("Format something")
    page = v.page
    expected = {"h3": 1, "em": 1, "ol li": 2, "pre code": 1, "td": 2, "a": 2, "img": 0, "script": 0}
    made = {tag: page.locator(f".turn:last-child .answer {tag}").count() for tag in expected}
    assert made == expected, made
    assert page.evaluate("window.pwned") is None
    assert '<img src=x onerror="window.pwned = 1"><script>' in v.answer, v.answer
    links = page.locator(".turn:last-child .answer a").evaluate_all(
        "links => links.map((a) => [a.href, a.rel])"
    )
    assert [href for href, _ in links] == ["https://example.com/", "https://evil.example/x.png"], links
    v.fits()
    v.picture("markdown")
    page.locator(".turn:last-child .foot", has_text="Copy").get_by_role("button", name="Copy").click()
    page.locator(".turn:last-child .foot", has_text="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == MARKDOWN, copied
    page.locator(".turn:last-child .code").get_by_role("button", name="Copy").click()
    page.locator(".turn:last-child .code", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def greet(name: str)")
    # on a page of plain HTTP of another machine there is no clipboard, but a command that copies
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.locator(".turn:last-child .foot", has_text="Copy").get_by_role("button", name="Copy").click()
    page.locator(".turn:last-child .foot", has_text="Copied").wait_for()
    page.evaluate("delete navigator.clipboard")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    return "a heading, a list, code, a table; HTML as text; both copy buttons"


def a_chat_can_be_left(v: Visit) -> str:
    v.new_chat()
    v.ask("A long question", 400)
    v.growing()
    v.new_chat()
    assert v.page.locator("#send").is_visible(), "another chat can be asked"
    assert v.page.locator(".turn").count() == 0
    v.answers("A short question", 5)
    other = v.answer
    v.go_to("A long question")
    before = v.growing()
    assert v.page.locator("#stop").is_visible(), "it runs"
    assert other not in before
    v.growing(len(before))
    assert v.page.locator(".question").all_inner_texts() == ["A long question"]
    v.page.locator("#stop").click()
    v.await_answer()
    stopped = v.answer
    assert v.note == "Stopped.", v.note
    v.page.wait_for_timeout(300)
    assert v.answer == stopped, "nothing comes after a stop"
    v.go_to("A short question")
    assert v.answer == other
    return f"both chats have their own answer; the first was stopped after {len(stopped)} characters"


def scrolling_up_stays(v: Visit) -> str:
    v.new_chat()
    v.stub(MARKDOWN)
    v.answers("Something long")
    v.ask("And more", 400)
    seen = v.growing()
    at = "document.getElementById('messages').scrollTop"
    end = "(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.getElementById('messages'))"
    assert v.page.evaluate(end) < 40, "it follows"
    v.page.locator("#messages").hover()
    if v.phone:
        v.page.evaluate("document.getElementById('messages').scrollTop = 0")
    else:
        v.page.mouse.wheel(0, -3000)
    v.page.locator("#latest").wait_for()
    v.page.wait_for_function(f"{at} === 0")
    seen = v.growing(len(seen) + 60)
    assert v.page.evaluate(at) == 0, "chunks do not scroll"
    v.page.locator("#latest").click()
    seen = v.growing(len(seen) + 60)
    assert v.page.evaluate(end) < 40, "it follows again"
    v.page.locator("#stop").click()
    v.await_answer()
    return "it stayed at the top while text came, and followed again"


def an_error_keeps_the_text(v: Visit) -> str:
    v.new_chat()
    text = "too long " * 9_000
    v.page.locator("#text").fill(text)
    v.page.locator("#send").click()
    v.page.locator("#problem", has_text="context").wait_for()
    assert v.draft == text.strip()
    assert v.page.locator(".turn").count() == 0
    said = v.page.locator("#problem").inner_text()
    v.fits()
    v.page.locator("#text").fill("")
    return said


def composition_does_not_send(v: Visit) -> str:
    v.new_chat()
    v.page.locator("#text").focus()
    sent = len(v.sent)
    v.cdp.send("Input.imeSetComposition", {"text": "にほん", "selectionStart": 3, "selectionEnd": 3})
    for code in (229, 13):  # of a key that the composition takes, and of Enter, which Safari sends
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": code}
        v.cdp.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", **enter})
        v.cdp.send("Input.dispatchKeyEvent", {"type": "keyUp", **enter})
    v.page.wait_for_timeout(200)
    assert len(v.sent) == sent, "sent during the composition"
    v.cdp.send("Input.insertText", {"text": "日本"})
    v.longest(5)
    v.page.locator("#text").press("Enter")
    v.await_answer()
    asked = v.page.locator(".question").last.inner_text()
    assert (asked, len(v.sent)) == ("日本", sent + 1), (asked, len(v.sent))
    return f"sent once, after the composition: {asked}"


def shift_enter_is_a_new_line(v: Visit) -> str:
    v.new_chat()
    text = v.page.locator("#text")
    text.press_sequentially("a")
    text.press("Shift+Enter")
    text.press_sequentially("b")
    assert v.draft == "a\nb"
    text.fill("")
    return "two lines"


# ---- faults ------------------------------------------------------------------------------------------


def gateway_of(pid: int) -> int:
    """The process of the gateway among the children of `headrace up`; 0 if there is none now."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == pid and b"gateway" in command and b"services.launcher.serve" in command:
                return int(folder.name)
    return 0


def a_killed_gateway_leaves_the_answer_so_far(v: Visit) -> str:
    v.new_chat()
    v.ask("A story", 400)
    so_far = v.growing(20)
    os.kill(gateway_of(v.pid), signal.SIGKILL)
    v.await_answer()
    assert v.answer.startswith(so_far[:20])
    assert v.note == "The connection to the gateway was lost: the answer ends here.", v.note
    v.new_chat()
    v.page.locator("#text").fill("Typed while it is away")
    v.page.locator("#send").click()
    v.page.locator("#problem:not(:empty)").wait_for()
    said = v.page.locator("#problem").inner_text()
    assert "The gateway does not answer" in said, said
    assert v.draft == "Typed while it is away"
    v.picture("away")
    v.page.locator("#health", has_text="ready").wait_for()
    v.longest(5)
    deadline = time.monotonic() + 60
    while v.page.locator(".turn").count() == 0 or not v.answer:
        assert time.monotonic() < deadline, "no answer after the gateway's start"
        if v.page.locator("#send").is_visible() and v.draft:
            v.page.locator("#send").click()
        v.page.wait_for_timeout(300)
    v.await_answer()
    v.go_to("A story")
    v.page.get_by_role("button", name="Try again").last.click()
    v.growing()
    v.await_answer()
    assert v.page.locator(".turn").count() == 1
    return f"{said} Afterwards both questions were answered."


def a_reload_keeps_the_chats_until_they_are_cleared(v: Visit) -> str:
    def titles() -> list[str]:
        return v.page.locator("#chats .chat").all_inner_texts()

    v.new_chat()
    v.answers("Kept over a reload", 8)
    answer = v.answer
    v.page.locator("#text").fill("half a que")
    before = v.page.locator("#chats .chat").all_text_contents()
    v.page.reload()
    v.page.locator(".turn").first.wait_for()
    assert (v.answer, v.draft) == (answer, "half a que")
    assert v.page.locator("#chats .chat").all_text_contents() == before
    v.ask("Interrupted by a reload", 400)
    so_far = v.growing(20)
    v.page.reload()
    v.page.locator(".turn").nth(1).wait_for()
    assert v.answer.startswith(so_far[:20])
    assert v.note == "The page was left before the answer ended.", v.note
    v.chats()
    v.page.once("dialog", lambda dialog: dialog.accept())
    v.page.locator("#clear").click()
    v.page.locator(".turn").first.wait_for(state="detached")
    kept = v.page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('headrace-chat-'))")
    assert kept == [], kept
    v.page.reload()
    v.page.locator("#chats .chat").first.wait_for(state="attached")
    assert v.page.locator("#chats .chat").all_text_contents() == ["New chat"]
    return f"{len(before)} chats came back, one of them cut by the reload; none after Clear all chats"


# ---- the fleet ---------------------------------------------------------------------------------------


def rows_by_keyboard(v: Visit) -> str:
    v.page.goto(f"{v.url}/#fleet")
    v.page.locator("#recent tr").nth(2).wait_for()
    v.page.locator("#recent tr").first.focus()
    v.page.keyboard.press("ArrowDown")
    v.page.keyboard.press("ArrowDown")
    v.page.keyboard.press("Enter")
    wanted = v.page.locator("#recent tr").nth(2).locator("td").nth(1).text_content()
    shown = v.page.locator("#trace .id span")
    v.page.locator("#trace .id", has_text=wanted).wait_for()
    v.send_a_wrong_request()
    v.page.wait_for_timeout(TICKS_MS)
    focused = v.page.evaluate("document.activeElement.cells[1].textContent")
    chosen = v.page.locator("#recent tr[aria-selected=true] td:nth-child(2)").all_text_contents()
    assert (focused, chosen, shown.text_content()) == (wanted, [wanted], wanted), (focused, chosen)
    v.fits()
    return "arrows and Enter chose a row; it was chosen and focused two refreshes later"


def a_selected_id_stays_selected(v: Visit) -> str:
    v.page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('#recent tr')[1].cells[1])")
    before = v.page.evaluate("getSelection().toString()").strip()
    v.send_a_wrong_request()
    v.page.wait_for_timeout(TICKS_MS)
    after = v.page.evaluate("getSelection().toString()").strip()
    rows = v.page.locator("#recent tr td:nth-child(2)").all_text_contents()
    assert before
    assert (before, rows.index(before)) == (after, 2), (before, after)
    return f"{before} was selected two refreshes and one new request later"


def running_and_refused_requests_are_in_the_list(v: Visit) -> str:
    v.open()
    v.new_chat()
    v.send_a_wrong_request()
    v.ask("Runs a while", 400)
    v.growing()
    v.page.locator("#to-fleet").click()
    v.page.locator("#recent .busy", has_text="running").first.wait_for()
    v.page.locator("#recent td.bad", has_text="Input should be a valid list").first.click()
    said = v.page.locator("#trace .bad", has_text="`messages`: Input should be a valid list").inner_text()
    v.fits()
    v.picture("fleet")
    v.page.locator("#to-chat").click()
    v.page.locator("#stop").click()
    v.await_answer()
    v.page.get_by_role("button", name="Timeline").last.click()
    v.page.locator("#trace .span").first.wait_for()
    v.page.locator("#recent tr.chosen td:nth-child(4)", has_text="200").wait_for()
    spans = v.page.locator("#trace .span").count()
    return f"one ran; one was refused: {said} The timeline of the one that was stopped has {spans} spans"


def no_l1_where_there_is_none(v: Visit) -> str:
    v.page.locator("#tiers .tier").first.wait_for()
    names = v.page.locator("#tiers b").all_text_contents()
    assert names == ["KV cache"], names
    assert "L1" not in v.page.locator("#fleet").inner_text()
    return "the KV cache alone"


def the_page_is_the_gateways_alone(v: Visit) -> str:
    v.page.goto(f"{v.url}/docs")
    v.page.locator("#operations details").first.wait_for()
    v.fits()
    assert v.hosts <= {v.url.split("/")[2], ""}, v.hosts
    errors = [each for each in v.errors if IGNORED not in each]
    assert errors == [], errors
    return "no other host, no error in the console, no refusal by the content security policy"


STEPS: tuple[Callable[[Visit], str], ...] = (
    limit_is_shown, figures_are_below_an_answer, markdown_is_shown_and_no_html, a_chat_can_be_left,
    scrolling_up_stays, an_error_keeps_the_text, composition_does_not_send, shift_enter_is_a_new_line,
    a_killed_gateway_leaves_the_answer_so_far, a_reload_keeps_the_chats_until_they_are_cleared,
    rows_by_keyboard, a_selected_id_stays_selected, running_and_refused_requests_are_in_the_list,
    no_l1_where_there_is_none, the_page_is_the_gateways_alone,
)  # fmt: skip


def simulated(browser: Browser, url: str, pid: str, only: str = "") -> int:
    """Every step in each kind of window."""
    failed = 0
    for size in SIZES:
        for scheme in ("light", "dark"):
            visit = Visit(browser, url, size, scheme, int(pid))
            for step in STEPS:
                if only not in step.__name__:
                    continue
                name = f"{visit.name}: {step.__name__.replace('_', ' ')}"
                try:
                    print(f"{name}: {step(visit)}", flush=True)
                except Exception as error:  # noqa: BLE001 - the other steps go on
                    failed += 1
                    print(f"{name}: FAILED: {str(error)[:400]}", flush=True)
                    visit.picture(f"failed_{failed}")
                    visit.open()
            visit.context.close()
    return failed


def real(browser: Browser, url: str, picture: str, paused: str) -> int:
    """A real model's answer, a paused request's explanation, and a picture of both views."""
    visit = Visit(browser, url, "desktop", "light")
    visit.answers("What is the capital of France?", 60)
    assert "Paris" in visit.answer, visit.answer
    visit.answers("Write a short Python function that adds two numbers.", 200)
    visit.page.screenshot(path=picture)
    visit.page.locator("#to-fleet").click()
    visit.page.locator("#recent tr", has_text=paused).click()
    words = visit.page.get_by_text("Paused: the KV cache was full").first
    words.wait_for()
    visit.page.locator("#tiers b", has_text="L1").wait_for()
    visit.page.set_viewport_size({"width": 1280, "height": 1150})
    visit.page.locator("#fleet").evaluate("view => view.scrollTo(0, 0)")
    visit.page.screenshot(path=picture.replace(".png", "_fleet.png"))
    print(f"a real model: {visit.answer[:60]!r}; {words.inner_text()}")
    visit.page.goto(f"{url}/docs")
    chat = visit.page.locator("#operations details", has_text="POST /v1/chat/completions")
    chat.locator("summary").click()
    chat.get_by_role("button", name="Send").click()
    chat.locator("pre", has_text="chat.completion").wait_for()
    print(f"/docs sent a chat; {visit.page.locator('#operations details').count()} operations")
    return 0


def tenant(browser: Browser, url: str, key: str) -> int:
    """A tenant's key comes with the address, leaves it, and shows the tenant's own requests alone."""
    visit = Visit(browser, url, "desktop", "light", opened=False)
    visit.open(f"#key={key}")
    assert key not in visit.page.url
    visit.answers("What is the capital of France?", 20)
    visit.page.locator("#to-fleet").click()
    visit.page.locator("#problems", has_text="needs the operator's key").wait_for()
    rows = visit.page.locator("#recent tr")
    rows.first.wait_for()
    assert (rows.count(), visit.page.locator("#services tr").count()) == (1, 0)
    print("a tenant's key: its one request, no service, no key in the address")
    return 0


if __name__ == "__main__":
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        mode = {"simulated": simulated, "real": real, "tenant": tenant}[sys.argv[1]]
        sys.exit(mode(chromium, *sys.argv[2:]))
