"""The controller over real experiments: what it does is kept, and seen by the assigner."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from outrider.gateway.experiments.arm_control import StoredArmControl
from outrider.gateway.experiments.assigner import Subject
from outrider.gateway.experiments.controller import ControllerMetrics, ExperimentController
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures, MeasureWriter
from outrider.gateway.experiments.registry import ExperimentRegistry
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.settings.experiments import ExperimentSpec
from outrider.gateway.storage.database import Database
from tests.gateway.experiments.measuring import NOON, outcome

_ARMS = {
    "control": {"weight": 1.0},
    "deep": {"weight": 1.0, "set": {"max_draft_nodes": 32}},
    "none": {"weight": 1.0, "set": {"speculation": "off"}},
}


@dataclass
class Lab:
    """A gateway's experiments, with a controller that looks when it is told to."""

    store: ExperimentStore
    registry: ExperimentRegistry
    measures: ArmMeasures
    control: StoredArmControl
    controller: ExperimentController

    @classmethod
    async def open(cls, **changes: object) -> "Lab":
        store = ExperimentStore(Database(None), wall_clock=lambda: NOON)
        spec = {"unit": "request", "arms": _ARMS} | changes
        store.create("budget", ExperimentSpec.model_validate(spec))
        store.start("budget")
        registry = ExperimentRegistry(store, b"secret" * 6)
        await registry.refresh()
        measures, totals = ArmMeasures(), MeasureStore(Database(None))
        writer = MeasureWriter(measures, totals, writer_id="w", wall_clock=lambda: NOON)
        control = StoredArmControl(lambda: registry.experiments.values(), store, registry.refresh)
        metrics = ControllerMetrics(CollectorRegistry())
        controller = ExperimentController(control, totals, writer.flush, metrics, clock=lambda: 0.0)
        return cls(store, registry, measures, control, controller)

    def serve(self, num: int, **by_arm: dict[str, object]) -> dict[str, int]:
        """Requests that are assigned, answered and counted; how many each arm got."""
        shares: dict[str, int] = {}
        for number in range(num):
            subject = Subject(key_id="key00001", request_id=f"r{number}", model="auto")
            assignment = self.registry.assign(subject)
            arms = () if assignment is None else assignment.measured
            arm = arms[0].arm if arms else ""
            shares[arm] = shares.get(arm, 0) + 1
            self.measures.observe(outcome(number, arms=arms, **by_arm.get(arm, {})))
        return shares


async def test_a_tripped_arm_is_stopped_in_the_store_and_is_assigned_no_more() -> None:
    lab = await Lab.open(guardrails={"error_share": 0.1})
    before = lab.serve(900, deep={"ending": "failed"})
    assert set(before) == {"control", "deep", "none"}
    await lab.controller.check()
    record = lab.store.get("budget")
    assert set(record.current.stopped_arms) == {"deep"}
    assert "error_share is above 0.1" in record.current.stopped_arms["deep"].reason
    assert record.is_running
    (watched,) = lab.control.watched()
    assert (set(watched.weights), watched.stopped_arms) == ({"control", "none"}, {"deep"})
    assert lab.store.events("budget")[0].kind == "arm_stopped"
    after = lab.serve(900)
    assert "deep" not in after
    assert after["control"] == before["control"]  # its units count for nobody
    await lab.controller.check()
    assert [event.kind for event in lab.store.events("budget")].count("arm_stopped") == 1


async def test_a_tripped_control_ends_the_experiment() -> None:
    lab = await Lab.open(guardrails={"error_share": 0.1})
    lab.serve(900, control={"ending": "failed"})
    await lab.controller.check()
    assert not lab.store.get("budget").is_running
    assert set(lab.serve(30)) == {""}


async def test_new_weights_are_kept_in_the_same_version_and_move_units() -> None:
    lab = await Lab.open(allocation={"kind": "thompson", "min_share": 0.1, "min_requests": 50})
    late = {"ttft_s": 0.9}
    before = lab.serve(900, deep=late, none=late)
    await lab.controller.check()
    record = lab.store.get("budget")
    assert record.version == 1
    assert record.current.weights["control"] > 0.75
    assert min(record.current.weights.values()) > 0.09
    after = lab.serve(900)
    assert after["control"] > 1.5 * before["control"]
