"""The site in a browser: its search finds the page that answers, and its pages fit a phone and load nothing.

`make test-site` makes the site and runs this.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import http.server
import inspect
import json
import os
import re
import threading
import time
from pathlib import Path
from urllib.parse import quote_plus, urljoin

import pytest

import paddle_flexckpt as fc
from tests.docs.scripts import script
from tests.pages import browser as browsers

SITE = os.environ.get("FLEXCKPT_SITE")
pytestmark = [
    pytest.mark.skipif(SITE is None, reason="THE SITE IS NOT TRIED: `make test-site` makes it"),
    pytest.mark.skipif(
        browsers.find() is None, reason="THE SITE IS NOT TRIED: no Chromium. Remedy: apt-get install chromium"
    ),
]

# By what a user types, the page that has to be among the first three.
QUERIES = {
    "sharding V2": "docs/recipes/",
    "check": "docs/guide/",
    "disk full": "docs/troubleshooting/",
    "ENOSPC": "docs/troubleshooting/",
    "rank killed during save": "docs/troubleshooting/",
    "unfinished checkpoint": "docs/troubleshooting/",
    "train from scratch in existing directory": "docs/troubleshooting/",
    "two runs in one directory": "docs/troubleshooting/",
    "steps of another run": "docs/troubleshooting/",
    "async save": "docs/guide/",
    "resume from checkpoint": "docs/trainer/",
    "convert hugging face": "docs/migration/",
    "tied embeddings": "docs/recipes/",
    "pipeline parallel": "docs/recipes/",
    "expert parallel": "docs/recipes/",
    "out of memory": "docs/guide/",
    "rename parameters": "docs/aoa/",
    "S3": "docs/guide/",
    "change world size": "docs/guide/",
    "stage 3 offload": "docs/recipes/",
    "loss jumps after load": "docs/guide/",
    "corrupt checkpoint": "docs/troubleshooting/",
    "keep latest checkpoints": "docs/manager/",
    "optimizer state missing": "docs/troubleshooting/",
    "rng state": "docs/guide/",
    "dataloader position": "docs/manager/",
    "bfloat16": "docs/cpu/",
    "PaddleNLP": "docs/trainer/",
    "torch DCP": "docs/coming_from/",
    "preemption": "docs/recipes/",
    "weight sync": "docs/weight_sync/",
    "resume on fewer GPUs": "docs/tutorial_fleet/",
    "change tensor parallel degree": "docs/guide/",
    "how do I read one tensor without paddle": "docs/guide/",
    "show values of a tensor": "docs/guide/",
    "learning rate wrong after resume": "docs/troubleshooting/",
    "checkpoint is corrupt what now": "docs/troubleshooting/",
    "is my checkpoint corrupted": "docs/troubleshooting/",
    "how big is my checkpoint": "docs/cli/",
    "gradient accumulation": "docs/recipes/",
    "different optimizer": "docs/troubleshooting/",
    "AdamW to SGD": "docs/troubleshooting/",
    "fine-tune new head": "docs/guide/",
    "paddle.save pdparams migrate": "docs/migration/",
    "save to S3": "docs/guide/",
    "vocabulary size changed": "docs/troubleshooting/",
    "fc.load strict": "docs/api/the-state-of-a-run/",
    "save options": "docs/api/the-state-of-a-run/",
    "keep_latest": "docs/api/the-state-of-a-run/",
    "async_save": "docs/api/the-state-of-a-run/",
    "load_state_dict": "docs/api/shards/",
    "fc.publish": "docs/api/whole-tensors-for-others/",
    "SaveReport": "docs/api/reports/",
    "check_replicas": "docs/api/the-state-of-a-run/",
    "keeplatest": "docs/api/the-state-of-a-run/",
    "no space left on device": "docs/troubleshooting/",
    "parameter renamed load checkpoint": "docs/guide/",
    "renamed parameter": "docs/guide/",
    "huggingface safetensors load": "docs/migration/",
    "pytorch state_dict": "docs/migration/",
    "remove unfinished save": "docs/troubleshooting/",
    "kill -9 during save leftovers": "docs/troubleshooting/",
    "go back to an earlier step and continue": "docs/manager/",
    "rollback": "docs/manager/",
    "slurm requeue": "docs/manager/",
    "two jobs write to same directory": "docs/troubleshooting/",
    "no checkpoint found": "docs/troubleshooting/",
    "estimate load time": "docs/rehearsal/",
    "node lost restore from memory": "docs/survive/",
    "mp_degree does not match number of GPUs": "docs/troubleshooting/",
    "AssertionError nranks mp_num": "docs/troubleshooting/",
    "virtual pipeline vpp": "docs/guide/",
    "checkpoint bigger than expected disk size": "docs/cli/",
    "load pipeline checkpoint with different number of stages": "docs/guide/",
    "which Paddle version": "docs/guide/",
    "sharding stage 1 to stage 2": "docs/guide/",
    "which strategy was it saved with": "docs/guide/",
    "who saved which part": "docs/guide/",
    "number of layers changed": "docs/troubleshooting/",
    "not restored: rng": "docs/troubleshooting/",
    "world size changed": "docs/guide/",
    "tied lm_head load from huggingface": "docs/aoa/",
    "transpose linear weight when loading torch checkpoint": "docs/aoa/",
    "tie_word_embeddings": "docs/aoa/",
    "rename layer checkpoint": "docs/guide/",
    "load checkpoint with extra layers": "docs/troubleshooting/",
    "resume finds nothing": "docs/troubleshooting/",
    "wrong directory starts from scratch": "docs/troubleshooting/",
    "master_weights": "docs/troubleshooting/",
    "square weight transposed not noticed": "docs/troubleshooting/",
    "config.json num_hidden_layers does not match": "docs/model_rules/",
    "git lfs pointer": "docs/troubleshooting/",
    "llama num_key_value_heads GQA": "docs/model_rules/",
    "manifest repair": "docs/troubleshooting/",
    "checkpoint file truncated": "docs/troubleshooting/",
    "PermissionError writing checkpoint": "docs/troubleshooting/",
    "read-only file system cannot write checkpoint": "docs/troubleshooting/",
    "dataset size changed resume": "docs/troubleshooting/",
    "SIGTERM is killed before checkpoint finished": "docs/manager/",
    "--model": "docs/model_rules/",
    "--format huggingface": "docs/migration/",
    "flexckpt convert --model llama": "docs/migration/",
    "save only on rank 0": "docs/troubleshooting/",
    "checkpoint resumed on wrong directory": "docs/troubleshooting/",
    "load checkpoint without process group no_dist": "docs/api/shards/",
    "load sharded checkpoint on single gpu for inference": "docs/guide/",
    "dcp_to_torch_save convert to one file": "docs/coming_from/",
    "keep only last 3 checkpoints": "docs/manager/",
    "max_to_keep": "docs/coming_from/",
    "merge_tensor_parallel unified checkpoint": "docs/coming_from/",
    "wait_until_finished async save": "docs/manager/",
    "strict false missing keys": "docs/troubleshooting/",
    "partial restore only some parameters": "docs/guide/",
    "change number of gpus when resuming": "docs/guide/",
    "optimizer state not loaded after resume": "docs/troubleshooting/",
    "save best model by metric": "docs/api/the-state-of-a-run/",
    "restore dataloader state": "docs/manager/",
    "sigterm preemption save checkpoint": "docs/manager/",
    "new optimizer param group finetune from checkpoint": "docs/api/the-state-of-a-run/",
}
# By the text of an error that a reader pastes, the section that has to be the first result.
PASTED = {
    "replicas of one shard differ (key 'experts.0.w', rank 1); expected the values of float32 [0:2] on rank 0": "fc106",
    "ValidationError: cannot load from '/data/run/step_00000100': the source has no such key (key 'model.w')": "fc201",
    "CheckpointError: cannot save to '/x': [rank 0] OSError: [Errno 28] No space left on device": "fc402",
    "another save is writing to /data/run. Remedy (FC403): wait until it has finished, or save elsewhere": "fc403",
    'ranks disagree: rank 0: {"lr": 1}; rank 1: {"lr": 2}': "fc502",
    "global shapes differ (key 'embed.weight', rank 0); expected [100, 8] (target); got [50, 8] (source)": "fc205",
    "cannot load from 'x': wrong. Remedy (FC704): something else that no page says": "fc704",
}
# The links of the first page of the results: the page, and its sections that answer best.
SECTIONS = """[...document.querySelectorAll(".md-search-result__item")[0].querySelectorAll(".md-search-result__link")]
  .map(link => link.hash)"""
# The pages of the results, in order. None: the search has not answered yet.
FOUND = """(() => {
  const items = [...document.querySelectorAll(".md-search-result__item")]
    .map(item => item.querySelector(".md-search-result__link"));  // then come links of its sections
  const meta = document.querySelector(".md-search-result__meta");
  const ended = items.length || (meta && /No matching/.test(meta.innerText));
  return ended ? items.map(item => item.pathname.slice(1)) : null;
})()"""
# Ask the program that searches for words, one after the other; keep the warnings with which it answers an error.
ASK = """(async () => {
  const config = JSON.parse(document.getElementById("__config").textContent);
  const get = async path => (await fetch(new URL(path, location))).text();
  const tell = "console.warn = (...said) => postMessage({said: said.map(String).join(' ')});";
  const worker = new Worker(URL.createObjectURL(new Blob([tell, await get(config.search)])));
  const said = [];
  const ask = (type, data) => new Promise(answered => {
    worker.onmessage = ({data}) => data.said ? said.push(data.said) : answered();
    worker.postMessage({type, data});
  });
  await ask(0, {...JSON.parse(await get("search/search_index.json")), options: {suggest: true}});
  for (const word of WORDS) await ask(2, word);
  return said;
})()"""


@pytest.fixture(scope="module")
def address():
    """A server of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *message):
            pass

    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with browsers.running(browsers.find()) as found:
        yield found


def pages():
    """The paths of the site's pages."""
    if SITE is None:
        return []
    return sorted(path.parent.relative_to(SITE).as_posix() + "/" for path in Path(SITE).rglob("index.html"))


def search(browser, address, words):
    browser.visit(f"{address}?q={quote_plus(words)}")
    until = time.monotonic() + browsers.TIMEOUT
    while (found := browser.run(FOUND)) is None:
        assert time.monotonic() < until, f"the search does not answer {words!r}"
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("words", QUERIES)
def test_the_page_that_answers_is_among_the_first_three(browser, address, words):
    found = search(browser, address, words)
    assert QUERIES[words] in found[:3]


@pytest.mark.parametrize("text", PASTED)
def test_the_text_of_an_error_finds_its_section(browser, address, text):
    assert search(browser, address, text)[0] == "docs/troubleshooting/"
    sections = [link for link in browser.run(SECTIONS) if link]
    assert sections[0].startswith(f"#{PASTED[text]}-")


def test_no_word_makes_the_search_raise(browser, address):
    index = json.loads(Path(SITE, "search", "search_index.json").read_text(encoding="utf-8"))
    texts = (re.sub("<[^>]*>", " ", each["title"] + " " + each["text"]) for each in index["docs"])
    words = sorted({word.lower() for text in texts for word in re.findall(r"[^\W_]+", text)})
    words = [str(digit) for digit in range(10)] + [word for word in words if re.search(r"\d", word)]
    assert len(words) > 200
    browser.visit(address)
    asked = ASK.replace("WORDS", json.dumps(words))
    answer = browser.call("Runtime.evaluate", expression=asked, awaitPromise=True, returnByValue=True)
    assert answer["result"].get("value") == []


def calls():
    """The public calls and methods that have options, by the page and the anchor of their entry."""
    for title, modules in fc.SUBJECTS.items():
        page = re.sub(r"\W+", "-", title.lower())
        for name in (name for names in modules.values() for name in names):
            found = getattr(fc, name)
            methods = inspect.getmembers(found, inspect.isfunction) if inspect.isclass(found) else []
            for place, call in [(name, found), *((f"{name}.{method}", each) for method, each in methods)]:
                if hasattr(call, "options_of_the_call"):
                    yield page, place.removesuffix(".__init__"), call


def test_options_stand_in_the_entries_of_their_calls():
    pytest.importorskip("paddle")
    from paddle_flexckpt.transfer.options import options_of

    seen = 0
    for page, place, call in calls():
        entry = Path(SITE, "docs", "api", page, "index.html").read_text(encoding="utf-8")
        entry = entry.partition(f'id="paddle_flexckpt.{place}"')[2]
        entry = re.split(r'<h[23] id="paddle_flexckpt\.', entry)[0]
        text = html.unescape(re.sub("<(?!/?b>)[^>]*>", "", entry))
        found = re.findall(r"<b>(\w+)</b>\s*\((.*?)(?:, default:\s*(.*?)\s*)?\)\s*–", text, re.S)
        told = {name: each for name, *each in found}
        assert "**options" not in entry
        parameters = inspect.signature(call).parameters
        for each in dataclasses.fields(options_of(call)):
            if each.init:
                assert each.name in told, (place, each.name)
                given, (kind, default) = parameters[each.name].default, told[each.name]
                assert kind, (place, each.name)
                if type(given) in (bool, int, str, type(None)):
                    assert eval(default) == given, (place, each.name)  # 5 << 30
        seen += 1
    assert seen > 15


def test_tags_are_found_and_not_shown(browser, address):
    search(browser, address, "corrupt checkpoint")
    shown = browser.run("[...document.querySelectorAll('.md-tag')].map(tag => tag.getClientRects().length)")
    assert shown and not any(shown)


def test_history_and_tables_of_numbers_do_not_answer(browser, address):
    meta = script("site").META
    excluded = {
        name.removesuffix(".md").removesuffix("README").rstrip("/") + "/"
        for name, told in meta.items()
        if "exclude" in told
    }
    assert "CHANGELOG/" in excluded and excluded <= set(pages())
    for words in ("changelog", "benchmarks", "scaling", "async save"):
        assert not excluded & set(search(browser, address, words))


def test_pages_fit_a_phone_and_load_nothing_from_elsewhere(browser, address):
    places = pages()
    assert len(places) > 30
    for place in places:
        browser.visit(urljoin(address, place), width=390)
        assert browser.run("document.documentElement.scrollWidth") <= 390, place
        asked = [said["request"]["url"] for name, said in browser.events if name == "Network.requestWillBeSent"]
        assert asked and [url for url in asked if not url.startswith((address, "data:", "blob:"))] == [], place
        assert [said for name, said in browser.events if name == "Runtime.exceptionThrown"] == [], place


def test_pictures_have_a_text(browser, address):
    seen = 0
    for place in pages():
        browser.visit(urljoin(address, place))
        texts = browser.run(
            "[...document.querySelectorAll('article img, article .drawing > svg')]"
            ".map(each => each.getAttribute('alt') || each.getAttribute('aria-label') || '')"
        )
        assert all(len(text) > 20 for text in texts), (place, texts)
        seen += len(texts)
    assert seen >= 6
