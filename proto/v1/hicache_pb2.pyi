from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefetchPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BEST_EFFORT: _ClassVar[PrefetchPolicy]
    WAIT_COMPLETE: _ClassVar[PrefetchPolicy]
    TIMEOUT: _ClassVar[PrefetchPolicy]
BEST_EFFORT: PrefetchPolicy
WAIT_COMPLETE: PrefetchPolicy
TIMEOUT: PrefetchPolicy

class EngineMessage(_message.Message):
    __slots__ = ("id", "registration", "heartbeat", "lookup_prefix", "prefetch", "wait_prefetch", "cancel_prefetch", "load", "backup", "release_lease", "close_session")
    ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    id: int
    registration: Registration
    heartbeat: Heartbeat
    lookup_prefix: LookupPrefixRequest
    prefetch: PrefetchRequest
    wait_prefetch: WaitPrefetchRequest
    cancel_prefetch: CancelPrefetchRequest
    load: LoadRequest
    backup: BackupRequest
    release_lease: ReleaseLeaseRequest
    close_session: CloseSessionRequest
    def __init__(self, id: _Optional[int] = ..., registration: _Optional[_Union[Registration, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., lookup_prefix: _Optional[_Union[LookupPrefixRequest, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., wait_prefetch: _Optional[_Union[WaitPrefetchRequest, _Mapping]] = ..., cancel_prefetch: _Optional[_Union[CancelPrefetchRequest, _Mapping]] = ..., load: _Optional[_Union[LoadRequest, _Mapping]] = ..., backup: _Optional[_Union[BackupRequest, _Mapping]] = ..., release_lease: _Optional[_Union[ReleaseLeaseRequest, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionRequest, _Mapping]] = ...) -> None: ...

class DaemonMessage(_message.Message):
    __slots__ = ("id", "registered", "heartbeat", "lookup_prefix", "prefetch", "wait_prefetch", "cancel_prefetch", "load", "backup", "release_lease", "close_session", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    registered: Registered
    heartbeat: Heartbeat
    lookup_prefix: LookupPrefixReply
    prefetch: PrefetchReply
    wait_prefetch: PrefetchProgress
    cancel_prefetch: PrefetchProgress
    load: LoadReply
    backup: BackupReply
    release_lease: ReleaseLeaseReply
    close_session: CloseSessionReply
    error: Error
    def __init__(self, id: _Optional[int] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., lookup_prefix: _Optional[_Union[LookupPrefixReply, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchReply, _Mapping]] = ..., wait_prefetch: _Optional[_Union[PrefetchProgress, _Mapping]] = ..., cancel_prefetch: _Optional[_Union[PrefetchProgress, _Mapping]] = ..., load: _Optional[_Union[LoadReply, _Mapping]] = ..., backup: _Optional[_Union[BackupReply, _Mapping]] = ..., release_lease: _Optional[_Union[ReleaseLeaseReply, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Registration(_message.Message):
    __slots__ = ("engine_id", "model", "revision", "regions", "layout", "group_id", "rank", "ranks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: str
    revision: str
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    layout: Layout
    group_id: str
    rank: int
    ranks: int
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., group_id: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("boot_id", "daemon_pid", "heartbeat_interval_s", "layout_fingerprint")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DAEMON_PID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    daemon_pid: int
    heartbeat_interval_s: float
    layout_fingerprint: bytes
    def __init__(self, boot_id: _Optional[str] = ..., daemon_pid: _Optional[int] = ..., heartbeat_interval_s: _Optional[float] = ..., layout_fingerprint: _Optional[bytes] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("ticket", "cuda", "nbytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    cuda: CudaMemory
    nbytes: int
    def __init__(self, ticket: _Optional[bytes] = ..., cuda: _Optional[_Union[CudaMemory, _Mapping]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("handle", "offset", "device_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    device_uuid: bytes
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class ReadyEvent(_message.Message):
    __slots__ = ("handle", "device_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    device_uuid: bytes
    def __init__(self, handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class LayerCells(_message.Message):
    __slots__ = ("region", "offset", "value")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    region: int
    offset: int
    value: int
    def __init__(self, region: _Optional[int] = ..., offset: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("page_size", "components", "pools")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, page_size: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "kind", "tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Component.Kind]
        FULL: _ClassVar[Component.Kind]
        SWA: _ClassVar[Component.Kind]
        MAMBA: _ClassVar[Component.Kind]
        CHUNKED: _ClassVar[Component.Kind]
    KIND_UNSPECIFIED: Component.Kind
    FULL: Component.Kind
    SWA: Component.Kind
    MAMBA: Component.Kind
    CHUNKED: Component.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Component.Kind
    tokens: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Component.Kind, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "component", "n_slots", "planes", "format", "replicated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    N_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    component: str
    n_slots: int
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    format: str
    replicated: bool
    def __init__(self, name: _Optional[str] = ..., component: _Optional[str] = ..., n_slots: _Optional[int] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., format: _Optional[str] = ..., replicated: bool = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("region", "offset", "stride", "nbytes", "layer")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    region: int
    offset: int
    stride: int
    nbytes: int
    layer: int
    def __init__(self, region: _Optional[int] = ..., offset: _Optional[int] = ..., stride: _Optional[int] = ..., nbytes: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("engine_id", "boot_id", "request_id", "adapter", "salt", "tokens", "session_id", "session_generation")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    request_id: str
    adapter: str
    salt: str
    tokens: bytes
    session_id: str
    session_generation: int
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., tokens: _Optional[bytes] = ..., session_id: _Optional[str] = ..., session_generation: _Optional[int] = ...) -> None: ...

class ComponentPages(_message.Message):
    __slots__ = ("component", "pages")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    component: str
    pages: bytes
    def __init__(self, component: _Optional[str] = ..., pages: _Optional[bytes] = ...) -> None: ...

class ComponentSlots(_message.Message):
    __slots__ = ("component", "pages", "slots")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    component: str
    pages: bytes
    slots: bytes
    def __init__(self, component: _Optional[str] = ..., pages: _Optional[bytes] = ..., slots: _Optional[bytes] = ...) -> None: ...

class ComponentResidency(_message.Message):
    __slots__ = ("component", "resident")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    component: str
    resident: bytes
    def __init__(self, component: _Optional[str] = ..., resident: _Optional[bytes] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("prompt", "device", "limit_pages")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_PAGES_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    device: _containers.RepeatedCompositeFieldContainer[ComponentResidency]
    limit_pages: int
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., device: _Optional[_Iterable[_Union[ComponentResidency, _Mapping]]] = ..., limit_pages: _Optional[int] = ...) -> None: ...

class LookupPrefixReply(_message.Message):
    __slots__ = ("lease_id", "boundary", "load", "storage_boundary", "matched_pages", "branching_boundary", "lease_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    MATCHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    BRANCHING_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    boundary: int
    load: _containers.RepeatedCompositeFieldContainer[ComponentPages]
    storage_boundary: int
    matched_pages: int
    branching_boundary: int
    lease_s: float
    def __init__(self, lease_id: _Optional[str] = ..., boundary: _Optional[int] = ..., load: _Optional[_Iterable[_Union[ComponentPages, _Mapping]]] = ..., storage_boundary: _Optional[int] = ..., matched_pages: _Optional[int] = ..., branching_boundary: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("prompt", "device", "limit_pages", "policy", "timeout_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_PAGES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    device: _containers.RepeatedCompositeFieldContainer[ComponentResidency]
    limit_pages: int
    policy: PrefetchPolicy
    timeout_s: float
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., device: _Optional[_Iterable[_Union[ComponentResidency, _Mapping]]] = ..., limit_pages: _Optional[int] = ..., policy: _Optional[_Union[PrefetchPolicy, str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("prefetch_id",)
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    prefetch_id: str
    def __init__(self, prefetch_id: _Optional[str] = ...) -> None: ...

class WaitPrefetchRequest(_message.Message):
    __slots__ = ("engine_id", "boot_id", "prefetch_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    prefetch_id: str
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., prefetch_id: _Optional[str] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("engine_id", "boot_id", "prefetch_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    prefetch_id: str
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., prefetch_id: _Optional[str] = ...) -> None: ...

class PrefetchProgress(_message.Message):
    __slots__ = ("state", "boundary", "storage_boundary", "arrived_pages", "wanted_pages", "reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[PrefetchProgress.State]
        PLANNING: _ClassVar[PrefetchProgress.State]
        READING: _ClassVar[PrefetchProgress.State]
        DONE: _ClassVar[PrefetchProgress.State]
        CANCELLED: _ClassVar[PrefetchProgress.State]
        FAILED: _ClassVar[PrefetchProgress.State]
    STATE_UNSPECIFIED: PrefetchProgress.State
    PLANNING: PrefetchProgress.State
    READING: PrefetchProgress.State
    DONE: PrefetchProgress.State
    CANCELLED: PrefetchProgress.State
    FAILED: PrefetchProgress.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    WANTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: PrefetchProgress.State
    boundary: int
    storage_boundary: int
    arrived_pages: int
    wanted_pages: int
    reason: str
    def __init__(self, state: _Optional[_Union[PrefetchProgress.State, str]] = ..., boundary: _Optional[int] = ..., storage_boundary: _Optional[int] = ..., arrived_pages: _Optional[int] = ..., wanted_pages: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("engine_id", "boot_id", "lease_id", "components", "ready", "cells")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    lease_id: str
    components: _containers.RepeatedCompositeFieldContainer[ComponentSlots]
    ready: ReadyEvent
    cells: LayerCells
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., components: _Optional[_Iterable[_Union[ComponentSlots, _Mapping]]] = ..., ready: _Optional[_Union[ReadyEvent, _Mapping]] = ..., cells: _Optional[_Union[LayerCells, _Mapping]] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("prompt", "components", "ready")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    components: _containers.RepeatedCompositeFieldContainer[ComponentSlots]
    ready: ReadyEvent
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., components: _Optional[_Iterable[_Union[ComponentSlots, _Mapping]]] = ..., ready: _Optional[_Union[ReadyEvent, _Mapping]] = ...) -> None: ...

class BackupReply(_message.Message):
    __slots__ = ("outcomes",)
    class Outcome(_message.Message):
        __slots__ = ("component", "stored_pages", "present_pages", "refused_pages", "reason")
        COMPONENT_FIELD_NUMBER: _ClassVar[int]
        STORED_PAGES_FIELD_NUMBER: _ClassVar[int]
        PRESENT_PAGES_FIELD_NUMBER: _ClassVar[int]
        REFUSED_PAGES_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        component: str
        stored_pages: int
        present_pages: int
        refused_pages: int
        reason: str
        def __init__(self, component: _Optional[str] = ..., stored_pages: _Optional[int] = ..., present_pages: _Optional[int] = ..., refused_pages: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[BackupReply.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[BackupReply.Outcome, _Mapping]]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("engine_id", "boot_id", "lease_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    lease_id: str
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("engine_id", "boot_id", "session_id", "session_generation", "salt")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_id: str
    session_id: str
    session_generation: int
    salt: str
    def __init__(self, engine_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., session_id: _Optional[str] = ..., session_generation: _Optional[int] = ..., salt: _Optional[str] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: bool
    def __init__(self, closed: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "boot_id", "uptime_s", "ready", "problems", "engines", "pools", "backends", "counters", "host_used_bytes", "host_capacity_bytes", "progress", "retained", "running_prefetches", "open_sessions")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: str
    uptime_s: float
    ready: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    backends: _containers.RepeatedCompositeFieldContainer[BackendStatus]
    counters: _containers.ScalarMap[str, int]
    host_used_bytes: int
    host_capacity_bytes: int
    progress: str
    retained: _containers.RepeatedCompositeFieldContainer[Retained]
    running_prefetches: int
    open_sessions: int
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., ready: bool = ..., problems: _Optional[_Iterable[str]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., backends: _Optional[_Iterable[_Union[BackendStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., host_used_bytes: _Optional[int] = ..., host_capacity_bytes: _Optional[int] = ..., progress: _Optional[str] = ..., retained: _Optional[_Iterable[_Union[Retained, _Mapping]]] = ..., running_prefetches: _Optional[int] = ..., open_sessions: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "model", "attached_s", "leases", "jobs")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: str
    attached_s: float
    leases: int
    jobs: int
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[str] = ..., attached_s: _Optional[float] = ..., leases: _Optional[int] = ..., jobs: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("model", "component", "frame_bytes", "resident_pages", "inbound_pages", "pinned_pages", "stored_pages")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_PAGES_FIELD_NUMBER: _ClassVar[int]
    INBOUND_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STORED_PAGES_FIELD_NUMBER: _ClassVar[int]
    model: str
    component: str
    frame_bytes: int
    resident_pages: int
    inbound_pages: int
    pinned_pages: int
    stored_pages: int
    def __init__(self, model: _Optional[str] = ..., component: _Optional[str] = ..., frame_bytes: _Optional[int] = ..., resident_pages: _Optional[int] = ..., inbound_pages: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., stored_pages: _Optional[int] = ...) -> None: ...

class BackendStatus(_message.Message):
    __slots__ = ("name", "kind", "healthy", "problem", "n_objects", "used_bytes", "capacity_bytes", "queued_writes", "queued_bytes", "read", "write", "breaker", "off")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    N_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_WRITES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    healthy: bool
    problem: str
    n_objects: int
    used_bytes: int
    capacity_bytes: int
    queued_writes: int
    queued_bytes: int
    read: bool
    write: bool
    breaker: str
    off: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., healthy: bool = ..., problem: _Optional[str] = ..., n_objects: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., queued_writes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., read: bool = ..., write: bool = ..., breaker: _Optional[str] = ..., off: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("preserve", "timeout_s")
    PRESERVE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    preserve: bool
    timeout_s: float
    def __init__(self, preserve: bool = ..., timeout_s: _Optional[float] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("dropped_pages", "kept_pages")
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    KEPT_PAGES_FIELD_NUMBER: _ClassVar[int]
    dropped_pages: int
    kept_pages: int
    def __init__(self, dropped_pages: _Optional[int] = ..., kept_pages: _Optional[int] = ...) -> None: ...

class AttachStorageRequest(_message.Message):
    __slots__ = ("name", "backend", "read", "write", "required")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    name: str
    backend: str
    read: bool
    write: bool
    required: bool
    def __init__(self, name: _Optional[str] = ..., backend: _Optional[str] = ..., read: bool = ..., write: bool = ..., required: bool = ...) -> None: ...

class AttachStorageReply(_message.Message):
    __slots__ = ("opened", "name", "problem")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    opened: bool
    name: str
    problem: str
    def __init__(self, opened: bool = ..., name: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class UpdateStorageRequest(_message.Message):
    __slots__ = ("name", "read", "write")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    name: str
    read: bool
    write: bool
    def __init__(self, name: _Optional[str] = ..., read: bool = ..., write: bool = ...) -> None: ...

class UpdateStorageReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachStorageRequest(_message.Message):
    __slots__ = ("name", "force", "timeout_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    force: bool
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., force: bool = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DetachStorageReply(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    def __init__(self, stopped: bool = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("engine_id", "model", "revision", "adapter", "salt", "tokens", "keep_s", "host_share")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    HOST_SHARE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: str
    revision: str
    adapter: str
    salt: str
    tokens: bytes
    keep_s: float
    host_share: float
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., tokens: _Optional[bytes] = ..., keep_s: _Optional[float] = ..., host_share: _Optional[float] = ...) -> None: ...

class PinPrefixReply(_message.Message):
    __slots__ = ("retained",)
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    retained: Retained
    def __init__(self, retained: _Optional[_Union[Retained, _Mapping]] = ...) -> None: ...

class Retained(_message.Message):
    __slots__ = ("pin_id", "model", "kept_pages", "asked_pages", "nbytes", "left_s", "reason")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEPT_PAGES_FIELD_NUMBER: _ClassVar[int]
    ASKED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    model: str
    kept_pages: int
    asked_pages: int
    nbytes: int
    left_s: float
    reason: str
    def __init__(self, pin_id: _Optional[str] = ..., model: _Optional[str] = ..., kept_pages: _Optional[int] = ..., asked_pages: _Optional[int] = ..., nbytes: _Optional[int] = ..., left_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    def __init__(self, pin_id: _Optional[str] = ...) -> None: ...

class UnpinPrefixReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume", "timeout_s")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    timeout_s: float
    def __init__(self, resume: bool = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("idle", "running")
    IDLE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    idle: bool
    running: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, idle: bool = ..., running: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("from_sequence", "boot_id", "snapshot")
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    boot_id: str
    snapshot: bool
    def __init__(self, from_sequence: _Optional[int] = ..., boot_id: _Optional[str] = ..., snapshot: bool = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("started", "gap", "events", "snapshot_end")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    started: WatchStarted
    gap: WatchGap
    events: PlacementEvents
    snapshot_end: WatchSnapshotEnd
    def __init__(self, started: _Optional[_Union[WatchStarted, _Mapping]] = ..., gap: _Optional[_Union[WatchGap, _Mapping]] = ..., events: _Optional[_Union[PlacementEvents, _Mapping]] = ..., snapshot_end: _Optional[_Union[WatchSnapshotEnd, _Mapping]] = ...) -> None: ...

class WatchStarted(_message.Message):
    __slots__ = ("boot_id", "oldest_sequence", "next_sequence", "restarted")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    oldest_sequence: int
    next_sequence: int
    restarted: bool
    def __init__(self, boot_id: _Optional[str] = ..., oldest_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ..., restarted: bool = ...) -> None: ...

class WatchGap(_message.Message):
    __slots__ = ("first_sequence", "next_sequence")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    next_sequence: int
    def __init__(self, first_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class WatchSnapshotEnd(_message.Message):
    __slots__ = ("next_sequence",)
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    def __init__(self, next_sequence: _Optional[int] = ...) -> None: ...

class PlacementEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PlacementEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PlacementEvent, _Mapping]]] = ...) -> None: ...

class PlacementEvent(_message.Message):
    __slots__ = ("sequence", "kind", "tier", "component", "page", "page_hash", "parent_hash", "reason", "model", "revision", "adapter", "tenant", "salt", "session_id")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[PlacementEvent.Kind]
        STORED: _ClassVar[PlacementEvent.Kind]
        REMOVED: _ClassVar[PlacementEvent.Kind]
        CLEARED: _ClassVar[PlacementEvent.Kind]
    KIND_UNSPECIFIED: PlacementEvent.Kind
    STORED: PlacementEvent.Kind
    REMOVED: PlacementEvent.Kind
    CLEARED: PlacementEvent.Kind
    class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TIER_UNSPECIFIED: _ClassVar[PlacementEvent.Tier]
        HOST: _ClassVar[PlacementEvent.Tier]
        STORAGE: _ClassVar[PlacementEvent.Tier]
    TIER_UNSPECIFIED: PlacementEvent.Tier
    HOST: PlacementEvent.Tier
    STORAGE: PlacementEvent.Tier
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: PlacementEvent.Kind
    tier: PlacementEvent.Tier
    component: str
    page: int
    page_hash: bytes
    parent_hash: bytes
    reason: str
    model: str
    revision: str
    adapter: str
    tenant: bytes
    salt: str
    session_id: str
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[PlacementEvent.Kind, str]] = ..., tier: _Optional[_Union[PlacementEvent.Tier, str]] = ..., component: _Optional[str] = ..., page: _Optional[int] = ..., page_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., reason: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant: _Optional[bytes] = ..., salt: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...
