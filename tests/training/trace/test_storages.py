"""The storage log counts what is alive, once, in the phase where it happens."""

import torch

from shardwise.training.trace.storages import StorageLog


def test_views_are_counted_once_and_deaths_are_seen():
    with StorageLog() as log:
        log.enter("forward")
        a = torch.zeros(1000)  # 4,000 bytes
        b = a.view(10, 100).t()
        c = a + 1
        assert log.live().bytes == 8000
        del a, c
        assert log.live().bytes == 4000  # the view keeps its base alive
        del b
        assert log.live().bytes == 0
    assert log.peak().bytes == 8000
    assert log.peak().terms == {"activations": 8000}


def test_peaks_are_per_phase_and_keep_what_was_alive_before():
    with StorageLog() as log:
        log.enter("forward")
        kept = torch.zeros(1000)
        log.enter("backward")
        gone = torch.zeros(500)
        del gone
        log.enter("step")
    peaks = log.peaks()
    assert peaks["forward"].bytes == 4000
    assert peaks["backward"].bytes == 6000
    assert peaks["step"].bytes == 4000
    assert peaks["backward"].terms == {"activations": 4000, "temporaries": 2000}
    del kept


def test_a_late_name_holds_for_the_whole_life():
    weight = torch.nn.Parameter(torch.zeros(100, 100))
    with StorageLog() as log:
        log.classify([weight], "weights")
        log.enter("forward")
        loss = (torch.ones(5, 100) @ weight).sum()
        log.enter("backward")
        loss.backward()
        log.classify([weight.grad], "gradients")
    terms = log.peaks()["backward"].terms
    assert terms["weights"] == terms["gradients"] == 40_000


def test_folding_every_step_gives_the_same_peaks():
    def run(fold: bool) -> dict:
        with StorageLog() as log:
            for size in (100, 300, 200):
                log.enter("forward")
                x = torch.zeros(size)
                y = x * 2
                log.enter("backward")
                del y
                if fold:
                    log.fold()
                    assert len(log.events) == 1
        return {phase: peak.bytes for phase, peak in log.peaks().items() if phase != "load"}

    assert run(True) == run(False)


def test_resized_storages_and_rounding():
    with StorageLog(round_to=512) as log:
        x = torch.zeros(1000)
        assert log.live().bytes == 4096
        x.untyped_storage().resize_(0)
        assert log.live().bytes == 0
        x.untyped_storage().resize_(4000)
        assert log.live().bytes == 4096


def test_restart_forgets_the_past_peak_only():
    with StorageLog() as log:
        log.enter("load")
        keep, big = torch.zeros(10), torch.zeros(10_000)
        del big
        log.restart()
        log.enter("forward")
        assert log.peak().bytes == keep.nbytes
