"""The gateway's engines that run elsewhere, as the settings name them."""

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from outrider.gateway.engines.backends.fleet_keys import FleetKeys, read_fleet_keys, require_safe
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.addresses import DNS, LISTS, is_looked_up
from outrider.gateway.engines.fleet.answer_audits import AuditPolicy
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.demand import Demand
from outrider.gateway.engines.fleet.discovery import DiscoveredPool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.stored_index import StoredIndex
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.process import reconnect_policy_of
from outrider.verifier.params import Tier

_MOST_REPLICAS: Final = 1024
_MOST_BLOCKS: Final = 2**23  # of all; half a GB, of which only what is filled is touched

RemoteEngines = RemoteEngineClient | DiscoveredPool

Tokenizers = Future[Mapping[Tier, str]]


def build_remote(settings: Settings, tokenizers: Tokenizers | None = None) -> RemoteEngines:
    """Build the client of `engine.replicas`: of one engine, or a pool of many or of a name's.

    Raises SettingsError for an address or a key file.
    """
    options = settings.engine
    keys = None if options.replicas_key is None else read_fleet_keys(options.replicas_key)
    for entry in options.replicas:
        require_safe(_endpoint(entry), keys, insecure=options.replicas_insecure)
    policy = reconnect_policy_of(settings)
    first = options.replicas[0]
    if len(options.replicas) == 1 and not is_looked_up(first):
        return RemoteEngineClient(first, keys, tokenizers=tokenizers, policy=policy)
    index = BlockIndex(max_blocks=_MOST_BLOCKS, max_lanes=_MOST_REPLICAS)
    stored = StoredIndex(max_blocks=_MOST_BLOCKS, max_lanes=_MOST_REPLICAS)
    placement = CacheAware(index, stored)
    return DiscoveredPool(
        options.replicas,
        partial(_make_replica, placement, keys, tokenizers, policy),
        placement,
        resume_within_s=options.resume_within_s,
        demand=Demand(
            start_within_s=options.start_within_s,
            max_waiting=options.max_waiting,
            waits_for_tiers=not settings.tiers,
        ),
        audits=AuditPolicy(
            share=settings.fleet.audit_share, removes_at=settings.fleet.audit_removes_at
        ),
    )


def _endpoint(entry: str) -> str:
    """Return the address that tells whether an entry's engines are on this machine alone.

    What a name means is known later, so it never is; a page on this machine tells of engines that
    take gateways without keys on this machine only.
    """
    if entry.startswith(LISTS):
        url = urlsplit(entry)
        return f"tcp://{url.hostname}:{url.port or 80}"
    return f"tcp://{entry.removeprefix(DNS)}" if entry.startswith(DNS) else entry


def _make_replica(
    placement: CacheAware,
    keys: FleetKeys | None,
    tokenizers: Tokenizers | None,
    policy: ReconnectPolicy,
    address: str,
) -> EngineReplica:
    """Make a replica whose cache's news go to the placement. The pool resumes its requests."""
    lane = placement.index.add_lane()
    client = RemoteEngineClient(
        address,
        keys,
        tokenizers=tokenizers,
        on_lost=partial(placement.clear_lane, lane),
        policy=ReconnectPolicy(
            stall_timeout_s=policy.stall_timeout_s,
            unready_after_s=policy.unready_after_s,
            resume_within_s=0,
        ),
    )

    def note(news: BlocksChanged | BlocksReset) -> None:
        if not placement.note_news(lane, news):
            client.follow_block_events(note)  # a message is missing: begin anew

    client.follow_block_events(note)
    return EngineReplica(address, client, index_lane=lane, process=client, endpoint=client.endpoint)
