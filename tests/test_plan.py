"""Planning: order, limits, duplicates, bad records, sharing, groups, and the division of a cluster."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import UserError
from codec.keys import chunk_keys, root_key
from pipeline.calibration import SAMPLE_PROMPTS, choose_sample
from pipeline.options import Options, Verify
from pipeline.plan import Bad, Prompt, admit, group_prompts, make_plan
from pipeline.prompts import part_name, work_items
from pipeline.ray_runtime import Cluster, check_shared, choose_device, connected, divide
from pipeline.work import Group, make_group

CHUNK = 4
ROOT = root_key(target=bytes(32), cache_format="bf16", chunk_tokens=CHUNK)


def prompt(name: str, tokens: list[int], place: int = 0, content: str | None = None) -> Prompt:
    digest = hashlib.blake2b((content or name).encode(), digest_size=32).digest()
    keys = b"".join(chunk_keys(ROOT, tokens, CHUNK))
    return Prompt(name, len(tokens), keys, "prompts/x", place, digest, (0, place), f"corpus.jsonl:{place + 1}")


# ---------------------------------------------------------------- admission
def test_prompts_come_in_corpus_order_and_the_limit_counts_distinct_ones() -> None:
    prompts = [prompt("c", [3], 3), prompt("a", [1], 0), prompt("a", [1], 1), prompt("b", [2], 2)]
    admitted = admit(prompts, [], limit=2, skip_bad=False, corpus="corpus.jsonl")
    assert [p.id for p in admitted.prompts] == ["a", "b"]
    assert admitted.duplicates == 1


def test_one_id_for_two_prompts_is_an_error_that_names_both_places() -> None:
    prompts = [prompt("a", [1], 0, "one"), prompt("a", [1], 4, "two")]
    with pytest.raises(UserError, match=r"'a' .*corpus\.jsonl:1 and at corpus\.jsonl:5"):
        admit(prompts, [], limit=None, skip_bad=True, corpus="corpus.jsonl")


def test_bad_records_stop_the_job_unless_they_are_to_be_skipped() -> None:
    bad = [Bad("corpus.jsonl:9", "is late", (0, 8)), Bad("corpus.jsonl:2", "has no id", (0, 1))]
    with pytest.raises(UserError, match=r"corpus\.jsonl:2: has no id \(and 1 more"):
        admit([prompt("a", [1])], bad, limit=None, skip_bad=False, corpus="corpus.jsonl")
    admitted = admit([prompt("a", [1])], bad, limit=None, skip_bad=True, corpus="corpus.jsonl")
    assert [b.source for b in admitted.bad] == ["corpus.jsonl:2", "corpus.jsonl:9"]


def test_what_comes_after_the_limit_is_not_looked_at() -> None:
    bad = [Bad("corpus.jsonl:9", "is late", (0, 8))]
    admitted = admit([prompt("a", [1]), prompt("b", [2], 9)], bad, limit=1, skip_bad=False, corpus="c")
    assert [p.id for p in admitted.prompts] == ["a"] and admitted.bad == []


def test_a_corpus_without_a_usable_prompt_is_an_error() -> None:
    with pytest.raises(UserError, match="no prompt"):
        admit([], [Bad("c:1", "is empty", (0, 0))], limit=None, skip_bad=True, corpus="c")


# ---------------------------------------------------------------- chunks and groups
def test_chunks_are_new_shared_or_stored() -> None:
    prefix = list(range(8))
    prompts = [prompt("a", [*prefix, 50, 51], 0), prompt("b", [*prefix, 60, 61, 62, 63, 64], 1)]
    plan = make_plan(prompts, CHUNK, stored=frozenset([prompts[0].key(0)]))
    assert (plan.occurrences, len(plan.chunks), plan.shared, len(plan.new)) == (7, 5, 2, 4)
    assert plan.tokens == 23 and plan.new_tokens == 11
    assert [plan.chunks[key].tokens for key in prompts[0].all_keys()] == [4, 4, 2]


def test_what_is_stored_needs_no_group() -> None:
    prompts = [prompt("a", list(range(9)))]
    plan = make_plan(prompts, CHUNK, stored=frozenset(prompts[0].all_keys()))
    assert plan.groups == [] and plan.new == []


def test_prompts_with_one_first_chunk_are_grouped_with_longest_shared_prefixes_side_by_side() -> None:
    prefix = list(range(4))
    left, right = [*prefix, 1, 1, 1, 1], [*prefix, 2, 2, 2, 2]
    prompts = [
        prompt("l1", [*left, 5], 0),
        prompt("r1", [*right, 5], 1),
        prompt("l2", [*left, 6], 2),
        prompt("other", [9, 9, 9, 9], 3),
        prompt("r2", [*right, 6], 4),
    ]
    groups = [[p.id for p in group] for group in make_plan(prompts, CHUNK, stored=frozenset()).groups]
    assert sorted(map(sorted, groups)) == [["l1", "l2", "r1", "r2"], ["other"]]
    order = next(group for group in groups if len(group) == 4)
    assert {order[0][0], order[1][0]} != {"l", "r"} and {order[2][0], order[3][0]} != {"l", "r"}


def test_a_huge_group_is_split() -> None:
    prompts = [prompt(f"p{i}", [1, 2, 3, 4, 100 + i], i) for i in range(40)]
    groups = make_plan(prompts, CHUNK, stored=frozenset()).groups
    assert sorted(len(group) for group in groups) == [8, 16, 16]


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


@given(token_lists, st.integers(0, 2**12), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_groups_cover_every_new_chunk_exactly_where_it_is_needed(
    lists: list[list[int]], stored_bits: int, size: int
) -> None:
    prompts = [prompt(f"p{i}", tokens, i) for i, tokens in enumerate(lists)]
    chunks = make_plan(prompts, CHUNK, stored=frozenset()).chunks
    stored = frozenset(key for n, key in enumerate(chunks) if stored_bits >> n & 1)
    groups = group_prompts(prompts, chunks, stored, size)
    covered = {key for group in groups for p in group for key in p.all_keys()} - stored
    assert covered == set(chunks) - stored
    for group in groups:
        assert 1 <= len(group) <= size
        assert len({p.key(0) for p in group}) == 1
        assert [p.keys for p in group] == sorted(p.keys for p in group)
    again = group_prompts(list(reversed(prompts)), chunks, stored, size)
    assert {p.keys for g in again for p in g} == {p.keys for g in groups for p in g}


def test_a_group_travels_as_text() -> None:
    prompts = [prompt("a", list(range(9))), prompt("b", [*range(4), 7], 1)]
    keys = prompts[0].all_keys()
    group = make_group(prompts, frozenset(keys[:1]), {keys[2]: bytes(16)})
    back = Group.from_json(group.to_json())
    assert back == group and keys[0] not in back.todo and back.lost == {keys[2]: bytes(16)}


# ---------------------------------------------------------------- calibration sample
def test_the_sample_measures_each_chunk_once_and_is_the_same_in_any_order() -> None:
    prefix = list(range(12))
    prompts = [prompt(f"p{i}", [*prefix, i, i, i, i], i) for i in range(30)]
    samples = choose_sample(prompts, CHUNK)
    assert samples == choose_sample(list(reversed(prompts)), CHUNK)
    assert len(samples) == SAMPLE_PROMPTS
    measured = [key for sample in samples for key in sample.measured]
    assert len(measured) == len(set(measured)) == 3 + SAMPLE_PROMPTS
    for sample in samples:
        assert sample.measured <= set(sample.prompt.keys[: sample.chunks])


# ---------------------------------------------------------------- work items, parts
def test_work_items_cover_each_file_and_a_small_limit_needs_one_shard() -> None:
    assert [(i["file"], i["shard"]) for i in work_items(["a", "b"], None, 4)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert len(work_items(["a"], 3, 16)) == 1


def test_a_part_is_named_by_what_it_holds() -> None:
    row = {"id": "a", "payload": "{}", "token_ids": [1, 2], "tenant": ""}
    assert part_name([row]) == part_name([dict(row)])
    assert part_name([row]) != part_name([row | {"token_ids": [1, 3]}])
    assert part_name([row]) != part_name([row, row])
    assert part_name([row]) != part_name([row | {"tenant": "ab" * 32}])


def test_one_id_of_two_tenants_is_two_prompts() -> None:
    prompts = [replace(prompt("a", [1], place, content="x"), tenant=name) for place, name in enumerate(["", "t", "t"])]
    admitted = admit(prompts, [], limit=None, skip_bad=False, corpus="corpus.jsonl")
    assert [p.tenant for p in admitted.prompts] == ["", "t"] and admitted.duplicates == 1


def test_a_prompt_stored_at_two_lengths_is_two_prompts_of_a_store() -> None:
    prompts = [prompt("a", [1, 2], 0, "x"), prompt("a", [1, 2, 3, 4, 5], 1, "x"), prompt("a", [1, 2], 2, "x")]
    admitted = admit(prompts, [], limit=None, skip_bad=False, corpus="the store", one_corpus=False)
    assert [p.n_tokens for p in admitted.prompts] == [2, 5] and admitted.duplicates == 1


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chunk_tokens", 0, "--chunk-tokens 0"),
        ("actors", 0, "--actors 0"),
        ("limit", -1, "--limit -1"),
        ("predictor", "int3", "--predictor 'int3'"),
        ("loop", "half", "--loop 'half'"),
        ("cache_dtype", "fp8", "--cache-dtype 'fp8'"),
        ("gpus_per_actor", 1.5, "whole number"),
        ("gpus_per_actor", 0.0, "no positive number"),
        ("verify", "some", "--verify 'some'"),
        ("verify", "sample:0", "--verify 'sample:0'"),
        ("salt_env", "KV_TEST_NO_SUCH_VARIABLE", "KV_TEST_NO_SUCH_VARIABLE"),
        ("report", "no/such/folder/r.json", "does not exist"),
    ],
)
def test_an_option_that_cannot_be_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options("m", "c", "s", **{field: value}).check()  # type: ignore[arg-type]


def test_a_sample_of_chunks_is_a_share_of_the_keys() -> None:
    keys = [hashlib.blake2b(bytes([i % 256, i // 256]), digest_size=32).digest() for i in range(2000)]
    share = sum(map(Verify.parse("sample:0.25").selects, keys)) / len(keys)
    assert 0.2 < share < 0.3
    assert all(map(Verify.parse("all").selects, keys)) and not any(map(Verify.parse("none").selects, keys))


def test_the_salt_is_in_no_representation_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TEST_SALT", "hush-hush")
    options = Options("m", "c", "s", salt_env="KV_TEST_SALT")
    options.check()
    assert options.salt() == b"hush-hush" and "hush" not in repr(options)


# ---------------------------------------------------------------- the cluster
LAPTOP = Cluster(nodes=1, cpus=4, gpus=0, memory=16e9, embedded=True)


def test_two_cores_are_shared_by_one_encoder_and_one_verifier() -> None:
    pools = divide(LAPTOP, device="cpu", actors=None, gpus_per_actor=None, groups=9, verify=True, actor_bytes=1 << 30)
    assert (pools.encoders, pools.encode_cpus, pools.verifiers, pools.verify_cpus) == (1, 1, 1, 1)
    alone = divide(LAPTOP, device="cpu", actors=1, gpus_per_actor=None, groups=9, verify=False, actor_bytes=1 << 30)
    assert (alone.encoders, alone.encode_cpus, alone.verifiers) == (1, 2, 0)
    more = replace(LAPTOP, cpus=6, cores=2)  # as it is started for two actors
    both = divide(more, device="cpu", actors=2, gpus_per_actor=None, groups=9, verify=False, actor_bytes=1 << 30)
    assert (both.encoders, both.encode_cpus) == (2, 1)


def test_more_actors_than_a_machine_serves_are_refused_before_ray_starts() -> None:
    with pytest.raises(UserError, match="--actors 100000 is too many for the"), connected(100_000):
        pass


def test_actors_fit_into_memory_and_are_no_more_than_groups() -> None:
    big = Cluster(nodes=1, cpus=66, gpus=0, memory=64e9, embedded=False)
    kind = {"device": "cpu", "actors": None, "gpus_per_actor": None, "verify": True}
    assert divide(big, groups=99, actor_bytes=1 << 30, **kind).encoders == 29  # type: ignore[arg-type]
    assert divide(big, groups=99, actor_bytes=30 << 30, **kind).encoders == 1  # type: ignore[arg-type]
    assert divide(big, groups=3, actor_bytes=1 << 30, **kind).encoders == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "each", "verify", "expected"),
    [(1, 1.0, True, (1, 1, 0)), (1, 0.5, True, (1, 1, 0.5)), (4, 1.0, True, (2, 2, 1)), (4, 2.0, False, (2, 0, 2.0))],
)
def test_gpus_are_divided(gpus: int, each: float, verify: bool, expected: tuple[int, int, float]) -> None:
    cluster = Cluster(nodes=1, cpus=32, gpus=gpus, memory=1e12, embedded=False)
    pools = divide(cluster, device="cuda", actors=None, gpus_per_actor=each, groups=99, verify=verify, actor_bytes=1)
    assert (pools.encoders, pools.verifiers) == expected[:2]
    assert pools.encoders * pools.encode_gpus + pools.verifiers * pools.verify_gpus <= gpus


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="--actors 9"):
        divide(LAPTOP, device="cpu", actors=9, gpus_per_actor=None, groups=9, verify=True, actor_bytes=1)
    with pytest.raises(UserError, match="no GPU"):
        choose_device("cuda", LAPTOP)


def test_a_local_store_on_several_nodes_is_refused_without_shared_fs() -> None:
    several = Cluster(nodes=3, cpus=12, gpus=0, memory=1e11, embedded=False)
    with pytest.raises(UserError, match="--shared-fs"):
        check_shared(several, store_is_local=True, shared_fs=False, uri="file:///store")
    check_shared(several, store_is_local=True, shared_fs=True, uri="file:///store")
    check_shared(several, store_is_local=False, shared_fs=False, uri="s3://bucket")
    check_shared(LAPTOP, store_is_local=True, shared_fs=False, uri="file:///store")
