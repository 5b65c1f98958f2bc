"""The benchmark of whole models measures what it says, loses no row, and goes on when a model breaks."""

import copy
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from atlas_lm.models import configure
from atlas_lm.models.counts import parameters
from atlas_lm.models.sizes import SIZES, Size
from benchmarks import models
from benchmarks.kernel_bench.measuring import Limits
from benchmarks.model_bench import clock as clocks
from benchmarks.model_bench import families, jobs
from benchmarks.model_bench.clock import Marks, clock, quartiles
from benchmarks.model_bench.families import FAMILIES, Family, count, pick
from benchmarks.model_bench.jobs import Job, Plan
from benchmarks.model_bench.plot import lines, plot
from benchmarks.model_bench.profiling import SHOWN, Kernel, kernels, listing
from benchmarks.model_bench.rows import add, latest, load, say, table

CPU = torch.device("cpu")
FAST = Limits(repeats=3, seconds=0.02)
TRAIN = Job("train", 2, 8)
FAMILY = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def micro(monkeypatch):
    """A size of a few thousand weights, few words, few steps."""
    monkeypatch.setitem(SIZES, "micro", Size(32, 2, 2, 48, 8, 4, small=True))
    monkeypatch.setattr(families, "VOCABULARY", 61)
    monkeypatch.setattr(jobs, "STEPS", 2)


def plan(**changes):
    sizes = dict(size="micro", lengths=(8, 16), step=16, stream=32, batch=2, prompt=4)
    return Plan(**(sizes | changes))


def exact(name):
    """A model in fp32, where two ways to the same numbers agree."""
    torch.manual_seed(0)
    return FAMILY[name].draw("micro").eval()


def bench(**changes):
    facts = dict(command="by hand", commit="abc123", device="a CPU")
    return models.Bench(CPU, plan(), FAST, facts=facts, **changes)


def fake(name, build, **changes):
    return Family(name=name, draw=build, ours=False, **changes)


def llama(_):
    return FAMILY["llama"].draw("micro")


class TestTheWholeWay:
    def test_rows(self, tmp_path):
        given = "--device cpu --size micro --lengths 8 16 --step 16 --stream 32 --batch 2".split()
        given += ["--only", "gated_deltanet,attention", "llama", "--seconds", "0.02"]
        models.main([*given, "--repeats", "3", "--commit", "abc123", "--out", str(tmp_path)])
        rows = load(tmp_path / "models.csv")
        shapes = [("prefill", 1, 8), ("prefill", 1, 16), ("stream", 1, 32), ("decode", 2, 128)]
        shapes += [("train", 2, 8), ("train", 1, 16)]
        names = ["gated_deltanet", "attention", "llama"]
        assert [row.key for row in rows] == [(n, *shape) for n in names for shape in shapes]
        skipped = {(row.name, row.what): row.note for row in rows if not row.timed}
        assert skipped == {
            ("attention", "stream"): "with full attention the state grows with the stream",
            ("llama", "stream"): "a stream wants a model of this project",
        }
        config = configure("gated_deltanet", size="micro", vocab_size=61)
        assert rows[0].params == parameters(config)["total"]
        for row in rows:
            assert (row.peer, row.commit) == (row.name == "llama", "abc123")
            assert row.checkpointing == ("no" if row.what == "train" else "")
            if row.timed and row.what != "stream":
                tokens = 2 * jobs.STEPS if row.what == "decode" else row.batch * row.tokens
                assert row.tokens_per_s == pytest.approx(tokens / (row.ms / 1e3))
                assert row.low_tokens_per_s <= row.tokens_per_s <= row.high_tokens_per_s

    def test_a_second_run_stands_behind_the_first(self, tmp_path):
        given = (
            "--device cpu --size micro --lengths 8 --step 16 --what train --seconds 0.02".split()
        )
        for name in ("llama", "attention"):
            models.main([*given, "--only", name, "--out", str(tmp_path)])
        keys = [row.key for row in load(tmp_path / "models.csv")]
        assert keys == [("llama", "train", 2, 8), ("attention", "train", 2, 8)]
        pytest.importorskip("matplotlib")
        assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")

    def test_profile(self, capsys):
        given = "--device cpu --size micro --lengths 8 --step 16 --profile llama".split()
        models.main(given)
        said = capsys.readouterr().out
        assert "llama, training step of 2 x 8" in said
        assert "aten::mm" in said and said.rstrip().endswith("sum")


class TestWhatGoesWrong:
    def test_a_model_that_is_not_there_or_breaks_is_a_row(self):
        def broken(_):
            raise RuntimeError("\nout of luck\nat length")

        def absent(_):
            import a_package_that_nobody_has  # noqa: F401

        made = [fake("broken", broken), fake("absent", absent), fake("sound", llama)]
        rows = list(bench().run(made, [TRAIN]))
        assert [row.status for row in rows] == ["failed", "missing", "timed"]
        assert rows[0].note == "RuntimeError: out of luck"
        assert "a_package_that_nobody_has" in rows[1].note
        assert "failed: broken: RuntimeError: out of luck" in table(rows)

    def test_a_job_that_fails_does_not_end_the_others(self):
        def deaf(size):
            model = llama(size)
            model.loss_function = lambda **_: 1 / 0
            return model

        found = bench().run([fake("deaf", deaf)], [TRAIN, Job("prefill", 1, 8)])
        assert [(row.what, row.status) for row in found] == [
            ("train", "failed"),
            ("prefill", "timed"),
        ]

    def test_out_of_memory_is_tried_again_with_checkpointing(self):
        tries = []

        def narrow(size):
            model = llama(size)

            def refuse(module, *_):
                tries.append(module.is_gradient_checkpointing)
                if module.training and not module.is_gradient_checkpointing:
                    raise torch.OutOfMemoryError("too much")

            model.register_forward_pre_hook(refuse)
            return model

        longer = Job("train", 1, 16)
        rows = list(bench().run([fake("narrow", narrow)], [TRAIN, longer, Job("prefill", 1, 8)]))
        assert [row.checkpointing for row in rows] == ["yes", "yes", ""]
        assert all(row.timed for row in rows)
        # each step begins anew without, and nothing stays switched on
        assert tries[0] is False and tries[1] is True and tries[-1] is False
        assert tries.count(False) > 2
        assert "checkpointing" in say(rows[0])

    def test_out_of_memory_with_checkpointing_too(self):
        def huge(size):
            model = llama(size)

            def refuse(module, *_):
                if module.training:
                    raise torch.OutOfMemoryError("far too much")

            model.register_forward_pre_hook(refuse)
            return model

        rows = list(bench().run([fake("huge", huge)], [TRAIN, Job("prefill", 1, 8)]))
        assert [row.status for row in rows] == ["failed", "timed"]
        assert rows[0].note == "OutOfMemoryError: far too much"

    def test_a_loss_that_is_no_number_and_a_caution_are_said(self):
        def lost(size):
            model = llama(size)
            model.lm_head.weight.data.fill_(torch.nan)
            return model

        made = [fake("lost", lost), fake("doubted", llama, caution=lambda: "known to be wrong")]
        rows = list(bench().run(made, [TRAIN]))
        assert [row.status for row in rows] == ["timing only"] * 2
        assert [row.note for row in rows] == ["the loss is nan", "known to be wrong"]
        assert all(row.timed for row in rows)

    def test_a_model_is_gone_before_the_next_is_built(self):
        kept, alive = [], []

        def watched(size):
            alive.append([model() is not None for model in kept])
            model = llama(size)
            kept.append(weakref.ref(model))
            return model

        todo = [TRAIN, Job("decode", 2, 4)]
        list(bench().run([fake("one", watched), fake("two", watched)], todo))
        assert alive == [[], [False]]

    def test_after_the_budget_nothing_is_begun(self):
        rows = list(bench(deadline=0.0).run([fake("late", llama)], [TRAIN]))
        assert [(row.status, row.note) for row in rows] == [("skipped", "the budget is spent")]

    def test_after_the_device_is_lost_nothing_is_begun(self, monkeypatch):
        def gone(device):
            raise RuntimeError("illegal address")

        monkeypatch.setattr(models, "synchronize", gone)
        todo = [Job("prefill", 1, 8), TRAIN]
        rows = list(bench().run([fake("one", llama), fake("two", llama)], todo))
        assert [row.status for row in rows] == ["timed", "skipped", "skipped"]
        assert {row.note for row in rows[1:]} == {
            "the device was lost: RuntimeError: illegal address"
        }


class TestWhatIsMeasured:
    @pytest.mark.parametrize("name", ["llama", "gated_deltanet"])
    def test_a_training_step(self, name):
        """Against logits, their cross entropy and AdamW by hand."""
        model = exact(name)
        other = copy.deepcopy(model).train()
        step = jobs.training_step(TRAIN, FAMILY[name], model, CPU)
        optimizer = torch.optim.AdamW(other.parameters(), lr=jobs.RATE)
        ids = jobs.draw(TRAIN, model, CPU)
        assert ids.shape == (2, 8)
        for _ in range(2):
            logits = other(ids).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(step(), loss.detach())
        for (label, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert mine.grad is None
            # a gradient near zero may turn: its step is a rate, as that of any other
            assert (mine - theirs).abs().mean() < 0.02 * jobs.RATE, label

    @pytest.mark.parametrize("name", ["llama", "gated_deltanet"])
    def test_checkpointing_changes_no_number_and_is_undone(self, name):
        model = exact(name)
        first = jobs.training_step(TRAIN, FAMILY[name], copy.deepcopy(model), CPU)()
        with jobs.checkpointed(model, True):
            assert model.is_gradient_checkpointing
            torch.testing.assert_close(jobs.training_step(TRAIN, FAMILY[name], model, CPU)(), first)
        assert not model.is_gradient_checkpointing
        assert not model.get_input_embeddings()._forward_hooks

    @pytest.mark.parametrize("name", ["llama", "gated_deltanet", "attention"])
    @torch.no_grad()
    def test_decoding_says_what_generate_says(self, name):
        model, job = exact(name), Job("decode", 2, 5)
        prompt = jobs.draw(job, model, CPU)
        how = jobs.steps_of_ours if FAMILY[name].ours else jobs.steps_of_peers
        say_next, ids, form = how(model, prompt, plan())
        said = [ids]
        for _ in range(6):
            said.append(say_next(said[-1]))
        wanted = model.generate(
            prompt, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=0
        )
        assert torch.stack(said, dim=1).tolist() == wanted[:, 5:].tolist()
        assert form == "plain"

    def test_a_stride_lies_between_two_marks(self, monkeypatch):
        monkeypatch.setattr(jobs, "STRIDE", 8)
        model, reads, at_marks = exact("gated_deltanet"), [], []
        model.model.register_forward_pre_hook(
            lambda _, args: reads.append(args[0].shape[1]), with_kwargs=False
        )

        class Watched(Marks):
            def take(self):
                at_marks.append(len(reads))
                super().take()

        monkeypatch.setattr(jobs, "Marks", Watched)
        done = jobs.stream(Job("stream", 1, 32), FAMILY["gated_deltanet"], model, CPU)
        assert reads == [8] * 6
        assert at_marks == [2, 3, 4, 5, 6]
        assert len(done.clocked.seconds) == 4 and done.tokens == 8

    def test_all_families_are_built_with_weights_in_bf16(self):
        for family in FAMILIES:
            if family.name != "fla_gated_deltanet":
                model = family.build("micro", CPU)
                assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}

    def test_peers_are_as_large_as_ours(self, monkeypatch):
        monkeypatch.undo()
        with torch.device("meta"):
            sizes = {n: count(FAMILY[n].draw("340M")) for n in ("attention", "llama")}
        assert sizes["attention"] == sizes["llama"]

    def test_fla_is_as_large_as_ours(self, monkeypatch):
        pytest.importorskip("fla.models", reason="needs flash-linear-attention")
        monkeypatch.undo()
        with torch.device("meta"):
            names = ("gated_deltanet", "fla_gated_deltanet")
            ours, theirs = (count(FAMILY[name].draw("340M")) for name in names)
        assert abs(ours - theirs) < 0.01 * ours

    def test_newton_schulz_runs_once_per_chunk(self):
        for name in ("atlas", "atlas_pp"):
            with torch.device("meta"):
                spec = FAMILY[name].draw("340M").config.spec
            assert spec.timing.period == spec.timing.chunk == 64


class TestClock:
    @pytest.mark.parametrize(
        ("took", "repeats"),
        [(0.01, 5), (0.3, clocks.LEAST_REPEATS), (1.0, clocks.LEAST_REPEATS), (1.1, 1)],
    )
    def test_two_runs_warm_up_and_a_few_are_timed(self, monkeypatch, took, repeats):
        """Of a long run the second is timed too."""

        def once(run, device):
            run()
            return 0.5, took

        monkeypatch.setattr(clocks, "once", once)
        calls = []
        found = clock(lambda: calls.append(time.sleep(0.002)), CPU, Limits(5, 1.0))
        assert len(calls) == 2 + repeats and found.host == 0.5
        assert list(found.seconds[:-repeats]) == ([took] if repeats == 1 else [])
        assert min(found.seconds) >= 0.002

    def test_quartiles(self):
        assert quartiles([3.0]) == (3.0, 3.0, 3.0)
        assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


class TestRows:
    @pytest.fixture
    def row(self):
        return models.Row(
            name="llama",
            what="train",
            batch=2,
            tokens=64,
            status="timed",
            tokens_per_s=100.0,
            low_tokens_per_s=90.0,
            high_tokens_per_s=110.0,
            ms=1280.0,
            host_ms=2.5,
            repeats=3,
            peak_gib=1.5,
            checkpointing="yes",
            params=123,
            note="a, note",
            peer=True,
            command="python x",
            commit="abc",
            device="an H200",
        )

    def test_the_file_gives_back_what_was_added(self, row, tmp_path):
        failed = models.Row(name="x", what="", batch=0, tokens=0, status="failed", note='"no"\nway')
        for one in (row, failed):
            add(tmp_path / "deep" / "models.csv", one)
        assert load(tmp_path / "deep" / "models.csv") == [row, failed]

    def test_a_file_of_another_kind_is_left_alone(self, row, tmp_path):
        (tmp_path / "models.csv").write_text("case,group\n1,2\n")
        with pytest.raises(ValueError, match="has columns case, group, wanted name, what"):
            add(tmp_path / "models.csv", row)
        assert (tmp_path / "models.csv").read_text() == "case,group\n1,2\n"

    def test_of_the_same_measurement_the_last_that_was_timed_counts(self, row):
        newer, failed = replace(row, tokens_per_s=200.0), replace(row, status="failed")
        assert latest([failed, row, newer, failed]) == [newer]
        assert latest([failed]) == [failed]

    def test_rates_of_a_stream_are_those_of_all_strides(self):
        clocked = clocks.Clocked([1.0, 1.0, 1.0, 5.0])
        found = models.measured(jobs.Done(clocked, tokens=8, whole=True))
        assert found["tokens_per_s"] == 4 * 8 / 8.0
        assert found["ms"] == 1000.0
        assert models.measured(jobs.Done(clocked, tokens=8))["tokens_per_s"] == 8.0

    def test_the_table_fits(self, row):
        text = table([row, replace(row, status="failed", name="other", note="why")])
        assert max(map(len, text.splitlines())) <= 160
        assert "failed: other train 2x64" in text

    def test_the_plot_shows_what_was_timed(self, row, tmp_path):
        pytest.importorskip("matplotlib")
        ours = replace(row, name="ours", peer=False, tokens=128, checkpointing="no")
        decoded = replace(ours, what="decode", checkpointing="")
        rows = [
            ours,
            decoded,
            row,
            replace(row, status="failed", tokens=256),
            replace(row, tokens=32),
        ]
        drawn = lines(rows, ("train",), "peak_gib")
        assert {which: [r.tokens for r in found] for which, found in drawn.items()} == {
            ("llama", "train"): [32, 64],
            ("ours", "train"): [128],
        }
        plot(rows, tmp_path / "models.png")
        assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_kernels_are_counted():
    x = torch.rand(64, 64)

    def run():
        y = x @ x
        return y @ y, x.exp()

    found = {kernel.name: kernel for kernel in kernels(run, CPU)}
    assert found["aten::mm"].calls == 2 and found["aten::exp"].calls == 1
    assert found["aten::mm"].ms > 0


def test_the_listing_ends_in_the_sum_of_all():
    text = listing([Kernel(f"kernel {i}", 2, 1.0) for i in range(SHOWN + 5)])
    *_, others, total = text.splitlines()
    assert others.split() == ["5.000", "11.1%", "10", "5", "others"]
    assert total.split() == [f"{SHOWN + 5}.000", "100.0%", f"{2 * (SHOWN + 5)}", "sum"]
    assert "kernel 39" in text and "kernel 40" not in text


def test_names_and_jobs_are_picked():
    assert [family.name for family in pick(FAMILIES, ["llama", "titans"])] == ["titans", "llama"]
    with pytest.raises(ValueError, match="no model 'lama', wanted some of gated_deltanet"):
        pick(FAMILIES, ["lama"])
    todo = jobs.jobs(Plan(), ["train", "prefill"])
    assert [(job.what, job.batch, job.tokens) for job in todo] == [
        ("prefill", 1, 4096),
        ("prefill", 1, 32768),
        ("prefill", 1, 131072),
        ("train", 8, 4096),
        ("train", 1, 32768),
        ("train", 1, 131072),
    ]
    with pytest.raises(ValueError, match="what is 'training', wanted some of prefill"):
        jobs.jobs(Plan(), ["training"])
