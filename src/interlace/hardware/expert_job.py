"""The experts of a job as numbers, and what they count up to. Torch-free.

Rows are pairs of a token and one of its experts. No row is padded, and without a capacity none is
dropped, so an expert computes what was routed to it. `load` says how uneven that is: the rows that
chose the fullest expert over the mean of all. The other experts share the rest, and ranks wait for
the one that has the fullest. With a capacity an expert takes so many times the mean and no more.
"""

from dataclasses import dataclass

from interlace.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertJob:
    """Experts of each layer, and over how many ranks they are dealt."""

    count: int
    chosen: int
    """Experts of a token."""
    ffn: int
    """Inner width of an expert, a SwiGLU of three matrices without biases."""
    shared: int = 0
    """Inner width of the feed-forward that every token meets beside its experts; 0 for none."""
    ranks: int = 1
    """Ranks that hold the experts of a layer between them."""
    load: float = 1.0
    """Rows of the fullest expert over the mean of all; 1 is balanced."""
    capacity: float = 0.0
    """Most rows that an expert takes over the mean of all that were routed; 0: all of them."""
    sent_once: bool = False
    """Tensor ranks send parts of a row, which are gathered where its expert is, as Megatron does;
    the trainer's send whole rows each."""
    gathered: bool = False
    """Each rank gathers the rows of all of them whole and takes what its experts need, and results
    are summed over them, as Megatron's core 0.5 does; the trainer's send rows where they belong."""

    def __post_init__(self) -> None:
        if self.count % self.ranks:
            raise InputError(
                f"{self.count} experts cannot be dealt to {self.ranks} ranks",
                hint="set parallel.expert to a divisor of the number of experts",
            )
        most = self.count / self.chosen
        if not 1 <= self.load <= most:
            raise InputError(
                f"--expert-load {self.load:g}: the fullest of {self.count} experts, of which a "
                f"token meets {self.chosen}, has between 1 and {most:g} times the mean",
                hint="1 is balanced; the metric expert_imbalance of a run is such a number",
            )

    @property
    def held(self) -> int:
        """Experts of one rank."""
        return self.count // self.ranks

    @property
    def fullest(self) -> float:
        """Rows of the rank that has the fullest expert, over the mean of all ranks."""
        first, others = self._taken
        return (first + (self.held - 1) * others) / self.held

    @property
    def kept(self) -> float:
        """Share of the rows that no capacity drops."""
        first, others = self._taken
        return (first + (self.count - 1) * others) / self.count

    @property
    def _taken(self) -> tuple[float, float]:
        """Rows that the fullest expert and each other one take, over the mean of what was
        routed."""
        most = self.capacity or self.count
        return min(self.load, most), min((self.count - self.load) / max(1, self.count - 1), most)

    def parameters(self, hidden: int) -> int:
        """Of all experts of one layer."""
        return 3 * self.count * hidden * self.ffn

    def whole_parameters(self, hidden: int) -> int:
        """Of the router and the shared feed-forward, which every rank has."""
        return hidden * self.count + 3 * hidden * self.shared

    def active_parameters(self, hidden: int) -> int:
        """Of those that one token meets."""
        return 3 * self.chosen * hidden * self.ffn + self.whole_parameters(hidden)
