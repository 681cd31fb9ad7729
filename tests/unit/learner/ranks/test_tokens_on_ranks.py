"""Which tokens a rank has of a batch that rank 0 knows, and what it is told of the others."""

from dataclasses import replace

from tests.fixtures.learner.models import trajectory
from tests.fixtures.learner.ranks import run_ranks
from vcpo.wire.packing import ExpertRoutes
from vcpo_learner.forward.token_batch import batch_tokens
from vcpo_learner.ranks.commands import Commands, on_every_rank, without_tokens
from vcpo_learner.ranks.ranks import Ranks

ROUTES = ExpertRoutes(experts=bytes((3, 1)), num_layers=1, num_choices=1)
BATCH = [
    replace(
        trajectory(number, prompt=(number,) * 3, response=(9, 8, 7)[: number + 1], reward=number),
        expert_routes=ROUTES if number == 3 else None,
        reward_parts={"exact": 1.0},
        question="1 + 1",
        answer="2",
    )
    for number in (1, 2, 3)
]


class CountingRanks(Ranks):
    """Ranks that keep what was handed out, as numbers of trajectories by rank."""

    handed_out = []  # noqa: RUF012 - each rank is a process of its own

    def hand_out(self, parts):
        self.handed_out.append(list(map(len, parts)))
        return super().hand_out(parts)


def test_a_rank_gets_each_trajectory_that_it_runs_once():
    def laid_out(ranks):
        fields = {name: getattr(ranks, name) for name in Ranks.__dataclass_fields__}
        counting = CountingRanks(**fields)
        told = BATCH if ranks.is_leader else without_tokens(BATCH)
        tokens = batch_tokens(told, ranks.device, counting)
        for wanted in ([[0], [1]], [[0, 1], [2, 1]], [[1], [1]]):
            tokens.bring(wanted)
        return (
            {at: each.tolist() for at, each in tokens.token_ids.items()},
            {at: each.flatten().tolist() for at, each in tokens.expert_routes.items()},
            counting.handed_out,
        )

    first, second = run_ranks(2, laid_out)
    assert first == (
        {0: [1, 1, 1, 9, 8], 1: [2, 2, 2, 9, 8, 7]},
        {},
        [[1, 1], [1, 1]],
    )
    assert second == (
        {1: [2, 2, 2, 9, 8, 7], 2: [3, 3, 3, 9, 8, 7]},
        {2: [3, 1]},
        [[], []],
    )


class Told:
    """Something whose method notes what it is given."""

    def __init__(self, commands):
        self.commands = commands
        self.given = None
        commands.on("note", self.note)

    @on_every_rank
    def note(self, groups, *, version):
        self.given = groups, version


def test_other_ranks_are_told_the_lengths_of_trajectories_but_not_their_tokens():
    def given(ranks):
        told = Told(Commands(ranks))
        if ranks.is_leader:
            told.note([BATCH[:1], BATCH[1:]], version=7)
            told.commands.stop()
        else:
            told.commands.follow()
        return told.given

    first, (groups, version) = run_ranks(2, given)
    assert first == ([BATCH[:1], BATCH[1:]], 7)
    assert version == 7
    assert [len(group) for group in groups] == [1, 2]
    for one, whole in zip([*groups[0], *groups[1]], BATCH, strict=True):
        assert list(one.prompt_token_ids) == [0, 1, 2]
        assert list(one.response_token_ids) == list(range(len(whole.response_token_ids)))
        tokens = {
            "prompt_token_ids": whole.prompt_token_ids,
            "response_token_ids": whole.response_token_ids,
        }
        told = {"expert_routes": None, "reward_parts": {}, "question": "", "answer": ""}
        assert replace(one, **tokens) == replace(whole, **told)
