"""A task set of the verifiers library: say a word backwards."""

import verifiers.v1 as vf

__all__ = ["WordTasks"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def is_backwards(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word[::-1])

    @vf.reward
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)


class WordTasks(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            word = f"word{number}"
            yield WordTask(WordData(prompt=f"Say {word} backwards.", word=word))
