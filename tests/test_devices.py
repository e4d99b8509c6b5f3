"""Devices: which GPU each worker gets, out of those that the environment and the machine give this process."""

from pathlib import Path

import pytest

from headway.app.devices import Devices, Gpus, allot, allot_to_models, find_gpus
from headway.config import Settings
from headway.errors import SettingError

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"


def machine(root: Path, *nodes: str) -> Path:
    (root / "dev").mkdir()
    for node in nodes:
        (root / "dev" / node).touch()
    return root


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("3,4", ("3", "4")),
        (" 3 , 4 ", ("3", "4")),
        (f"{UUID},{MIG}", (UUID, MIG)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("1,1", ("1",)),
    ],
)
def test_the_environment_says_which_gpus_there_are(text: str, ids: tuple[str, ...], tmp_path: Path) -> None:
    root = machine(tmp_path, "nvidia0", "nvidiactl")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": text}, root) == Gpus(ids, text)


@pytest.mark.parametrize(
    ("text", "ids", "says"),
    [
        (
            "x,y",
            (),
            "CUDA_VISIBLE_DEVICES=x,y: 'x' is not a GPU id, and CUDA ignores it and what follows: workers run on the CPU",
        ),
        ("1,x,0", ("1",), "'x' is not a GPU id, and CUDA ignores it and what follows: only GPU 1 is used"),
    ],
)
def test_an_environment_without_a_gpu_is_told_of(text: str, ids: tuple[str, ...], says: str, tmp_path: Path) -> None:
    found = find_gpus({"CUDA_VISIBLE_DEVICES": text}, machine(tmp_path, "nvidia0", "nvidia1"))
    assert found.ids == ids
    assert says in found.warning


def test_a_machine_without_gpus_has_none_whatever_the_environment_says(tmp_path: Path) -> None:
    found = find_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}, machine(tmp_path, "null"))
    assert given(2, found) == ["cpu", "cpu"]
    assert "CUDA_VISIBLE_DEVICES=3,4 names GPUs, but this machine has none" in found.warning
    with pytest.raises(SettingError, match="but this machine has no GPU"):
        given(1, found, "3")


@pytest.mark.parametrize(
    ("nodes", "ids"),
    [
        ((), ()),
        (("null", "nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"), ("0", "1")),
        (("nvidia2", "nvidiactl"), ("0",)),
        (("dxg",), None),
        (("kfd",), None),
    ],
)
def test_the_machine_says_which_they_are(nodes: tuple[str, ...], ids: tuple[str, ...] | None, tmp_path: Path) -> None:
    root = machine(tmp_path, *nodes)
    assert find_gpus({}, root) == Gpus(ids)
    if ids is None:
        assert find_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}, root) == Gpus(("3", "4"), "3,4"), "they cannot be counted"
    if ids == ():
        (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
        assert find_gpus({}, root) == Gpus(("0",)), "the device files of a driver may not be there yet"


def given(workers: int, gpus: Gpus, devices: str = "") -> list[str]:
    made = allot(Settings(workers=workers, devices=devices), gpus)
    return [made.of(index) for index in range(workers)]


def test_workers_get_the_gpus_of_the_environment_in_order_and_without_a_gpu_the_cpu() -> None:
    assert given(2, Gpus(("3", "4"), "3,4")) == ["3", "4"]
    assert given(1, Gpus(("3", "4"), "3,4")) == ["3"]
    assert given(2, Gpus((UUID, MIG), f"{UUID},{MIG}")) == [UUID, MIG]
    assert given(3, Gpus((), "")) == ["cpu"] * 3
    assert given(2, Gpus(())) == ["cpu"] * 2


def test_where_gpus_cannot_be_counted_numbers_go_up_from_0_and_a_pool_grows_as_far_as_there_are() -> None:
    made = allot(Settings(workers=2), Gpus(None))
    assert [made.of(index) for index in range(4)] == ["0", "1", "2", "3"]
    made = allot(Settings(workers=1), Gpus(("3", "4"), "3,4"))
    assert (made.most, made.of(1)) == (2, "4")
    assert allot(Settings(workers=1), Gpus((), "")).most > 100
    assert allot(Settings(workers=1, devices="4"), Gpus(("3", "4"), "3,4")).most == 1


def test_models_of_which_one_may_go_to_zero_have_all_gpus_by_turns() -> None:
    zero = Settings(autoscale="local", min_workers=0, scale_to_zero_after_s=60)
    kept = Settings(autoscale="local", workers=1, max_workers=2)
    named = Settings(autoscale="local", devices="1")
    two = Gpus(("0", "1"))
    found = allot_to_models({"a": zero, "b": kept, "c": zero, "d": named}, two)
    by_turns = Devices(("0", "1"), 2, shared=True)
    assert found == {"a": by_turns, "b": by_turns, "c": by_turns, "d": Devices(("1",), 1)}
    assert allot_to_models({"a": kept, "b": Settings(autoscale="local", max_workers=0)}, Gpus(("0", "1", "2"))) == {
        "a": Devices(("0", "1"), 2), "b": Devices(("2",), 1),
    }  # fmt: skip
    with pytest.raises(SettingError, match="exceed the number of GPUs"):
        allot_to_models({"a": zero, "b": kept, "c": kept, "d": kept}, two)


def test_more_workers_than_gpus_are_refused_with_three_ways_out() -> None:
    with pytest.raises(SettingError) as caught:
        given(4, Gpus(("3", "4"), "3,4"))
    assert str(caught.value) == (
        "workers = 4: is more than the number of GPUs: CUDA_VISIBLE_DEVICES=3,4 allows 2 GPUs (3, 4). Use --workers 2. Or let "
        "workers share GPUs, each with its own copy of the model: --devices 3,4,3,4. Or use --devices cpu."
    )
    with pytest.raises(SettingError, match="this machine has 1 GPU"):
        given(2, Gpus(("0",)))


@pytest.mark.parametrize("devices", ["3,3", "4,3", "cpu,4", "cpu"])
def test_named_devices_are_taken_as_they_are(devices: str) -> None:
    expected = ["cpu", "cpu"] if devices == "cpu" else devices.split(",")
    assert given(2, Gpus(("3", "4"), "3,4"), devices) == expected


@pytest.mark.parametrize(
    ("devices", "gpus", "says"),
    [
        ("0", Gpus(("3", "4"), "3,4"), "but CUDA_VISIBLE_DEVICES=3,4 allows only GPU 3, 4. Name 3 or 4, or cpu. If"),
        ("0", Gpus((), ""), "but CUDA_VISIBLE_DEVICES= allows no GPU. Leave it out, or name cpu."),
        ("2", Gpus(("0", "1")), "but this machine has only GPU 0, 1. Name 0 or 1, or cpu."),
        ("0", Gpus(()), "but this machine has no GPU. Leave it out, or name cpu."),
        (UUID, Gpus((MIG,), MIG), "allows only GPU MIG-GPU"),
    ],
)
def test_a_gpu_that_is_not_for_this_process_is_refused(devices: str, gpus: Gpus, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        given(1, gpus, devices)
    assert caught.value.setting == "devices"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [
        (UUID.upper(), Gpus((UUID,), UUID)),
        (UUID[:12], Gpus((UUID,), UUID)),
        (UUID, Gpus((UUID[:12],), UUID[:12])),
        (UUID, Gpus(("0",))),
        (UUID, Gpus(("3",), "3")),
        ("7", Gpus(None)),
    ],
)
def test_a_gpu_that_cannot_be_compared_or_is_abbreviated_is_taken(devices: str, gpus: Gpus) -> None:
    assert given(1, gpus, devices) == [devices]
