"""Every error a user can meet, as one tree. Each class says what went wrong and what to do next.

    SwarmError
    |-- ModelError              the model named cannot be used (exit code 3)
    |   |-- ModelNotFound       no such directory, file or cached hub id
    |   |-- UnsupportedFamily   the family is not on the allow-list
    |   |-- DamagedWeights      a shard is truncated, or differs from the manifest
    |   `-- PromptTooLong       more tokens than the model's context holds
    |-- NoRoute                 blocks that nobody serves, or no peer left to try (exit code 4)
    |-- JoinError               the swarm cannot be joined (exit code 5)
    |   |-- BadJoinCode         typing error, or another version
    |   |-- Unreachable         no bootstrap address answered
    |   |-- WrongModel          the swarm serves another fingerprint
    |   `-- ClockSkew           this machine's clock is off
    |-- StartError              this machine cannot do it (exit code 6)
    |   |-- PortInUse
    |   |-- NotEnoughMemory
    |   |-- NoSuchDevice        the device asked for is not in this machine
    |   |-- DeviceLost          the device was there, and does not compute any more
    |   |-- UnsupportedQuantization  the device cannot compute with weights so quantized
    |   `-- DaemonFailed        p2pd did not start, or died and could not be restarted
    |-- SessionError            a generation ended before its end (exit code 7)
    |   |-- Superseded          another driver opened this session
    |   |-- Overloaded          every peer that could help is full
    |   `-- TimedOut            the caller's deadline passed
    |-- ProtocolError           the other side broke the wire protocol; the connection is closed
    `-- BadInput                an argument makes no sense (exit code 2)
"""

from __future__ import annotations

from collections.abc import Sequence


class SwarmError(Exception):
    """Base of all errors here. `advice` is the next thing to try, in one sentence."""

    exit_code = 1
    advice = ""

    def __init__(self, message: str, *, advice: str | None = None):
        super().__init__(message)
        if advice is not None:
            self.advice = advice


class BadInput(SwarmError):
    exit_code = 2


class ModelError(SwarmError):
    exit_code = 3


class ModelNotFound(ModelError):
    advice = "Give a directory with config.json and safetensors files, a .gguf file, or a cached hub id."


class UnsupportedFamily(ModelError):
    pass


class DamagedWeights(ModelError):
    advice = "Fetch the file again, or point at another copy of the model."


class PromptTooLong(ModelError):
    advice = "Shorten the prompt, or ask for fewer new tokens."


class NoRoute(SwarmError):
    """No chain of peers covers all blocks. `blocks` names those that nobody (usable) serves."""

    exit_code = 4
    advice = "Start a peer for them (swarm serve MODEL --join CODE), or wait for one with --wait SECONDS."

    def __init__(self, message: str, *, blocks: Sequence[int] = (), advice: str | None = None):
        super().__init__(message, advice=advice)
        self.blocks = tuple(blocks)


class JoinError(SwarmError):
    exit_code = 5


class BadJoinCode(JoinError):
    advice = "Copy the whole code again from the output of `swarm serve` or `swarm status`."


class Unreachable(JoinError):
    silent = False  # nothing at all came back: it may as well be our own network
    why = ""  # the reasons alone, where a peer was dialled: "192.0.2.1:4001: refused"
    advice = "Check that a peer named in the join code is running and that its address can be reached from here."


class WrongModel(JoinError):
    advice = "Use the same files as the swarm, or join another swarm."


class ClockSkew(JoinError):
    advice = "Set this machine's clock (for example: timedatectl set-ntp true), then try again."


class StartError(SwarmError):
    exit_code = 6


class PortInUse(StartError):
    advice = "Choose another --port, or leave it out and let the system choose."


class NotEnoughMemory(StartError):
    advice = "Serve fewer blocks with --blocks A:B, or free some memory."


class NoSuchDevice(StartError):
    advice = "Leave out --device, and the peer takes what is here."


class DeviceLost(StartError):
    advice = "See what the system says of it (dmesg), then start the peer again; --device cpu serves without it."


class UnsupportedQuantization(StartError):
    advice = "Use --quantize none."


class DaemonFailed(StartError):
    advice = "Try again; with --verbose the daemon's own output is shown."


class SessionError(SwarmError):
    exit_code = 7


class Superseded(SessionError):
    advice = "Only one process may drive a session at a time; open a new session here."


class Overloaded(SessionError):
    advice = "Try again later, or start another peer."


class TimedOut(SessionError):
    advice = "Try again, or allow more time."


class ProtocolError(SwarmError):
    advice = "Check that both sides run the same version."
