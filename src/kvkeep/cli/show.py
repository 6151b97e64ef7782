"""Tables for people, one function per command. Units are for reading; programs take --json."""

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.doctor import Check, Status
from kvkeep.limits import format_bytes
from kvkeep.types import printable

PIPE_COLUMNS = 200
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
_LOST = {
    "failed": "failed",
    "overflow": "dropped from a full queue",
    "lost": "evicted from L1 before",
}
_L1_ROWS = (
    ("capacity", "configured"),
    ("populated", "backed by memory now"),
    ("free", "can be taken at once"),
    ("resident", "holds KV that can be found"),
    ("reserved", "of it, being read: not evicted"),
    ("staging", "being written by engines"),
    ("orphaned", "its writer left and may still write"),
    ("quarantined", "its writer died with DMA in flight"),
)


def show_status(status: dict[str, Any]) -> None:
    """The server, its L1, its sessions, its problems."""
    up = _duration(status["uptime_s"])
    _print(_text(f"kvkeep {status['version']}  up {up}  epoch {status['epoch']}"))
    for problem in status.get("problems", ()):
        _print(_text(f"problem: {problem}", style="red"))
    l1 = status["l1"]
    table = _table("L1", "bytes>", "of L1>", "")
    for name, meaning in _L1_ROWS:
        size_bytes = l1[f"{name}_bytes"]
        share = f"{100 * size_bytes / max(1, l1['capacity_bytes']):.1f} %"
        _row(table, name, format_bytes(size_bytes), share, meaning)
    _print(table)
    _print(_text(f"{l1['objects']} objects, {status['leases']} leases open"))
    if memory := status.get("memory"):
        most, limit = (format_bytes(memory[name]) for name in ("total_bytes", "limit_bytes"))
        _print(_text(f"memory: at most {most} in all, of {limit} ({memory['limit_source']})"))
    _print(_sessions(status["sessions"]))
    more = status.get("session_count", 0) - len(status["sessions"])
    if more > 0:
        _print(_text(f"and {more} more sessions"))
    if status["l2"]:
        _print(_stores(status["l2"]))
        _print(_text(_under_way(status["transfers"])))


def show_persisted(answer: dict[str, Any]) -> None:
    """Whether L2 has everything now."""
    queued_bytes, running = answer["queued_bytes"], answer["running"]
    missing = answer.get("missing_chunks", 0)  # older servers do not say
    parts = []
    if queued_bytes or running:
        verb = "is" if running == 1 else "are"
        waiting = format_bytes(queued_bytes)
        parts.append(f"not yet: {waiting} wait and {_count(running)} {verb} being written")
    if missing:
        parts.append(f"not in L2: {_count(missing)}")
    if not parts:
        parts.append(_in_l2(answer.get("evicted_objects", 0)) if answer["done"] else "not yet")
    lost = [f"{n} {why}" for name, why in _LOST.items() if (n := answer[f"persist_{name}"])]
    since = f" (since the start: {', '.join(lost)})" if lost else ""
    _print(_text("; ".join(parts) + since))


def _in_l2(evicted: int) -> str:
    if not evicted:
        return "all that L1 holds is in L2"
    noun = "object" if evicted == 1 else "objects"
    return f"all that L1 holds was written to L2; L2 has evicted {evicted} {noun} since the start"


def _stores(stores: Sequence[dict[str, Any]]) -> Table:
    """Every L2 backend: its state, what it holds, what was wrong."""
    table = _table("L2", "place", "state", "objects>", "bytes>", "of>", "evicted>", "corrupt>", "")
    for store in stores:
        states = {"closed": "used", "open": "not used", "half_open": "being tried"}
        notes = [str(store["why"])] if store["why"] else []
        notes += [f"{store['stuck']} calls stuck"] if store["stuck"] else []
        notes += ["read-only"] if store["read_only"] else []
        if store["scanned"] < 1.0:
            notes.append(f"scan {store['scanned']:.0%}")
        sizes = (store["used_bytes"], store["capacity_bytes"])
        used, capacity = ("?" if size is None else format_bytes(size) for size in sizes)
        _row(
            table,
            store["name"],
            store["url"],
            states.get(store["state"], store["state"]),
            "?" if store["objects"] is None else str(store["objects"]),
            used,
            capacity,
            str(store["evicted"]),
            str(sum(store["corrupt"].values())),
            "; ".join(notes),
            style=None if store["state"] == "closed" and not store["stuck"] else "yellow",
        )
    return table


def _under_way(transfers: dict[str, int]) -> str:
    return (
        f"{transfers['fetches']} chunks being fetched for {transfers['pending_lookups']} lookups, "
        f"{transfers['persists']} being persisted, "
        f"{format_bytes(transfers['persist_queue_bytes'])} waiting for that"
    )


def show_leases(leases: Sequence[dict[str, Any]]) -> None:
    """Every lease; old ones marked."""
    if not leases:
        _print(_text("no leases are open"))
        return
    table = _table("lease", "kind", "session", "request", "chunks>", "bytes>", "age>", "pids")
    for row in leases:
        _row(
            table,
            row["lease"],
            row["kind"],
            row["session"],
            row["request"],
            str(row["chunks"]),
            format_bytes(row["bytes"]),
            _duration(row["age_s"]),
            _numbers(row["pids"]),
            style="yellow" if row["old"] else None,
        )
    _print(table)


def show_explanation(answer: dict[str, Any]) -> None:
    """One request: tokens by tier, chunks in ranges, the timeline."""
    _print(_text(f"request {answer['request']}", style="bold"))
    about = [f"session {answer['session']}"] if answer.get("session") else []
    about += [f"at {_moment(answer['at'])}"] if answer.get("at") else []
    if about:
        _print(_text(", ".join(about)))
    hit = answer["hit_tokens"]
    tiers = [("device", hit["device"]), ("L1", hit["l1"])]
    tiers += [(f"L2 {name}", tokens) for name, tokens in hit["l2"].items()]
    table = _table("tokens", ">")
    _row(table, "prompt", str(answer["prompt_tokens"]))
    for name, tokens in tiers:
        _row(table, f"from {name}", str(tokens))
    if answer.get("computed_tokens") is not None:
        _row(table, "computed", str(answer["computed_tokens"]))
    _print(table)
    if answer["saved_ms"] is not None:
        _print(_text(f"saved about {_ms(answer['saved_ms'], 0)} ms"))
    if answer["chunks"]:
        _print(_chunks(answer["chunks"], unneeded=_is_unneeded(answer)))
    table = _table("ms>", "event")
    for item in answer["timeline"]:
        _row(table, _ms(item["t_ms"]), item["event"])
    _print(table)


def show_cleared(answer: dict[str, Any]) -> None:
    """How much was forgotten, and what is still held."""
    l1 = answer["status"]["l1"]
    left = l1["staging_bytes"] + l1["reserved_bytes"]
    text = f"cleared {answer['cleared_chunks']} chunks; {format_bytes(l1['free_bytes'])} free"
    if left:
        text += f", {format_bytes(left)} in use by engines"
    _print(_text(text))


def show_quotas(answer: dict[str, Any]) -> None:
    """Every tenant, in each tier: what it has of what it may have."""
    table = _table("salt", "digest", "tier", "used>", "of>", "limit", "evicted>", "refused>")
    for row in answer["tenants"]:
        _quota_rows(table, row)
    _print(table)
    default = answer["default"]
    _print(_text(f"by default: {default['l1']} of L1, {default['l2']} of each L2 backend"))
    without = [store["name"] for store in answer["backends"] if not store["keeps_quotas"]]
    if without:
        _print(_text(f"no quotas in {', '.join(without)}: this kind of L2 keeps none"))
    if answer["left_out"]:
        _print(_text(f"{answer['left_out']} tenants that have less are not shown"))
    if not answer["file"]:
        _print(_text("limits end with the server: quota.file is not set"))


def show_ordered(answer: dict[str, Any]) -> None:
    """The tenant's limits as they are now, and whether they stay."""
    table = _table("salt", "digest", "tier", "used>", "of>", "limit", "evicted>", "refused>")
    _quota_rows(table, answer["tenant"])
    _print(table)
    kept = f"kept in {answer['file']}" if answer["kept"] else "not kept: set quota.file"
    _print(_text(f"applied, {kept}"))


def _quota_rows(table: Table, row: dict[str, Any]) -> None:
    name = row["salt"] or ("?" if row["tenant"] else "(no salt)")
    tiers = [("L1", row["l1"])] + [(f"L2 {tier['backend']}", tier) for tier in row["l2"]]
    for number, (tier, has) in enumerate(tiers):
        most_bytes = has["limit_bytes"]
        _row(
            table,
            "" if number else str(name),
            "" if number else row["tenant"],
            tier,
            format_bytes(has["used_bytes"]),
            "?" if most_bytes is None else format_bytes(most_bytes),
            has["limit"] if has["from"] == "own" else f"{has['limit']} by default",
            str(has["evicted"]),
            str(has["refused"]),
        )


def show_config(found: Sequence[dict[str, Any]]) -> None:
    """Key, value, source."""
    table = _table("key", "value", "source")
    for row in found:
        value = row["value"]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        style = "dim" if row["source"].startswith("default") else None
        _row(table, row["key"], text or '""', row["source"], style=style)
    _print(table)


def show_checks(checks: Sequence[Check]) -> None:
    """Each check, and below it what to do."""
    table = _table("", "check", "found")
    for check in checks:
        found = _text(check.detail)
        if check.fix:
            found.append(f"\nfix: {printable(check.fix)}", style=_COLOURS[check.status])
        _row(table, Text(check.status.value, style=_COLOURS[check.status]), check.name, found)
    _print(table)


def show_object_bench(report: dict[str, Any]) -> None:
    """Copies against memcpy, lookups against a round trip."""
    table = _table(
        "shape", "bytes>", "memcpy GB/s>", "store>", "retrieve>", "store/memcpy>",
        "retrieve/memcpy>", "verified",
    )  # fmt: skip
    for row in report["shapes"]:
        _row(
            table,
            row["name"],
            format_bytes(row["bytes"]),
            *(f"{row[f'{what}_gbps']:.2f}" for what in ("memcpy", "store", "retrieve")),
            f"{row['store_over_memcpy']:.2f}",
            f"{row['retrieve_over_memcpy']:.2f}",
            Text("yes", style="green") if row["verified"] else Text("NO", style="red"),
        )
    _print(table)
    table = _table("lookup, chunks>", "p50 us>", "p99 us>", "round trip us>", "hashing us>")
    for row in report["lookup"]:
        keys = ("p50_us", "p99_us", "socket_rtt_us", "hash_us")
        _row(table, str(row["chunks"]), *(f"{row[key]:.0f}" for key in keys))
    _print(table)


def show_engine_bench(report: dict[str, Any]) -> None:
    """Time to first token by where the KV came from; the price of a miss."""
    ttft = report["ttft_s"]
    rows = [("cold", ttft["cold"]), ("vLLM's own hit", ttft["native_hit"])]
    rows.append(("L1 hit", ttft["l1_hit"]))
    rows += [(f"L2 hit, {name}", seconds) for name, seconds in ttft["l2_hit"].items()]
    table = _table("KV from", "TTFT ms>", "cold / this>")
    for name, seconds in rows:
        _row(table, name, f"{1e3 * seconds:.1f}", f"{ttft['cold'] / seconds:.1f}")
    _print(table)
    miss = report["all_miss"]
    low, high = miss["ttft_ratio_ci95"]
    _print(
        _text(
            f"prompt {report['prompt_tokens']} tokens; a miss costs {miss['cpu_ratio']:.3f} x CPU, "
            f"{miss['ttft_ratio']:.3f} x TTFT [{low:.3f}, {high:.3f}], {miss['pairs']} pairs; "
            f"same tokens: {'yes' if report['same_tokens'] else 'NO'}"
        )
    )


def show_backend_bench(report: dict[str, Any]) -> None:
    """Rates beside the reference's."""
    size = format_bytes(report["objects"] * report["object_bytes"])
    _print(_text(f"{report['backend']}: {report['objects']} objects, {size} per round"))
    table = _table("", "kvkeep GB/s>", "plain files GB/s>", "ratio>")
    for way in ("put", "get"):
        rates = (report[f"{way}_gbps"], report[f"reference_{way}_gbps"], report[f"{way}_ratio"])
        _row(table, way, *(f"{rate:.2f}" for rate in rates))
    _print(table)
    _print(_text("every byte came back" if report["verified"] else "BYTES DIFFER"))


def show_index_bench(report: dict[str, Any]) -> None:
    """Bytes of an entry, a lookup among few and among many, the longest call of each kind."""
    _print(_text(f"{report['chunks']} chunks, {report['bytes_per_entry']:.0f} bytes each"))
    table = _table("chunks>", "lookup of 128, us>")
    for chunks, microseconds in report["lookup_128_us"].items():
        _row(table, chunks, f"{microseconds:.0f}")
    _print(table)
    table = _table("call", "longest ms>")
    for name, milliseconds in report["longest_call_ms"].items():
        _row(table, name, f"{milliseconds:.2f}")
    _print(table)


def show_simulation(report: dict[str, Any]) -> None:
    """How many events held every invariant, and where one did not."""
    _print(
        _text(
            f"{report['seeds']} seeds, {report['events']} events, {len(report['failures'])} "
            f"failures, digest {report['digest']}"
        )
    )
    known = len(report["coverage"]) + len(report["faults"]) - len(report["impossible"])
    never = report["never"]
    met = f"{known - len(never)} of {known} pairs of state and event and kinds of fault were met"
    more = f" and {len(never) - 5} more; more seeds meet more" if len(never) > 5 else ""
    _print(_text(f"{met}; not {', '.join(never[:5])}{more}" if never else met))
    if report["failures"]:
        table = _table("seed>", "step>", "what")
        for row in report["failures"]:
            _row(table, str(row["seed"]), str(row["step"]), str(row["what"]))
        _print(table)


def _sessions(sessions: Sequence[dict[str, Any]]) -> Table | Text:
    if not sessions:
        return _text("no sessions")
    table = _table("session", "model", "client", "ranks", "state", "chunk>", "reserved>", "pids")
    for row in sessions:
        _row(
            table,
            row["session"],
            row["model"],
            row["client"],
            f"{len(row['ranks'])} of {row['world']}",
            ("ready" if row["ready"] else "waiting") + ("" if row["writes"] else ", reads only"),
            format_bytes(row["chunk_bytes"]),
            format_bytes(row["reserved_bytes"]),
            _numbers(row["pids"]),
        )
    return table


def _is_unneeded(answer: dict[str, Any]) -> bool:
    """What L1 has was not loaded, since the engine's own cache had it."""
    hit = answer["hit_tokens"]
    told = any("not needed" in item["event"] for item in answer["timeline"])
    return told and not hit["l1"] and hit["device"] > 0


def _chunks(chunks: Sequence[dict[str, Any]], *, unneeded: bool) -> Table:
    table = _table("chunks", "outcome", "tier", "reason", "")
    for first, last, row in ranges(chunks):
        span = str(first) if first == last else f"{first}-{last}"
        outcome, tier, reason, detail = (
            row[key] or "" for key in ("outcome", "tier", "reason", "detail")
        )
        if unneeded and outcome == "hit":
            outcome, detail = "in L1", "not loaded: the engine's own cache had it"
            tier = "device"
        _row(table, span, outcome, tier, reason, detail)
    return table


def ranges(chunks: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Neighbours that differ only in their index, as (first index, last index, the first row)."""

    def what(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for key, value in sorted(row.items()) if key != "index")

    for _, group in groupby(chunks, key=what):
        rows = list(group)
        yield rows[0]["index"], rows[-1]["index"], rows[0]


def _table(*heads: str) -> Table:
    """Columns by their headings; one that ends in ">" is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in heads:
        justify: Literal["left", "right"] = "right" if ">" in head else "left"
        table.add_column(head.rstrip(">"), justify=justify, overflow="fold")
    return table


def _row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    texts = (_text(cell) if isinstance(cell, str) else cell for cell in cells)
    table.add_row(*texts, style=style)


def _text(text: str, style: str = "") -> Text:
    """What clients send is neither markup nor control codes of the terminal."""
    return Text(printable(text), style=style)


def _print(what: Table | Text) -> None:
    # In a pipe there is no width: lines that wrap at 80 would break what people grep for.
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    Console(highlight=False, width=width).print(what)


def _count(chunks: int) -> str:
    return f"{chunks} chunk" + ("" if chunks == 1 else "s")


def _ms(value: float, digits: int = 1) -> str:
    """Clocks of two threads differ a little: what rounds to zero has no sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _moment(at: str | float) -> str:
    if isinstance(at, str):
        return at
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def _duration(seconds: float) -> str:
    for unit, scale in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
