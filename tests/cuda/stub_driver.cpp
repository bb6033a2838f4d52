// A libcuda.so.1 without a device, for machines that have none: the driver's own prototypes over plain memory,
// so that our calls by ctypes (argument types, structures by value, symbol versions) run as they are.
//
// Device memory is a mapped file below $HICACHE_STUB_DIR, which another process maps by its handle; a stream is a
// thread. As strict as the real one where that has bitten somebody: calls without a current context fail, a
// handle cannot be opened by its exporter or twice, a batch may not span two registrations.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

struct Handle { char name[64]; };
struct Location { int kind, number; };
struct Attributes { int order; Location source, target; unsigned flags; };
struct Allocation { size_t nbytes; std::string name; bool imported; };
struct Marks { std::atomic<uint64_t> recorded, happened; };
struct Event { Marks* marks; std::string name; bool shared; };

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool busy = false, closed = false;
    std::thread thread{[this] { serve(); }};
    void serve() {
        for (;;) {
            std::unique_lock<std::mutex> hold(mutex);
            changed.wait(hold, [this] { return closed || !queue.empty(); });
            if (queue.empty()) return;
            auto work = queue.front();
            queue.pop_front();
            busy = true;
            hold.unlock();
            work();
            hold.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void add(std::function<void()> work) {
        std::lock_guard<std::mutex> hold(mutex);
        queue.push_back(std::move(work));
        changed.notify_all();
    }
    void drain() {
        std::unique_lock<std::mutex> hold(mutex);
        changed.wait(hold, [this] { return queue.empty() && !busy; });
    }
};

static std::mutex guard;
static std::map<CUdeviceptr, Allocation> allocations;
static std::map<CUdeviceptr, size_t> registered;
static std::atomic<unsigned> names{0};
static thread_local void* current = nullptr;
static int context_of_device_0;
#define NEEDS_CONTEXT if (current == nullptr) return INVALID_CONTEXT

static std::string fresh(const char* kind) {
    return std::string(kind) + "-" + std::to_string(getpid()) + "-" + std::to_string(names++);
}

static void* map_file(const std::string& name, size_t nbytes, bool create) {
    const std::string path = std::string(getenv("HICACHE_STUB_DIR")) + "/" + name;
    const int fd = open(path.c_str(), O_RDWR | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (fd < 0) return nullptr;
    struct stat found;
    if (create && ftruncate(fd, nbytes) != 0) abort();
    if (fstat(fd, &found) != 0) abort();
    void* at = mmap(nullptr, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? nullptr : at;
}

static size_t size_of_file(const std::string& name) {
    struct stat found;
    const std::string path = std::string(getenv("HICACHE_STUB_DIR")) + "/" + name;
    return stat(path.c_str(), &found) == 0 ? found.st_size : 0;
}

static bool mine(const std::string& name) {
    return name.find("-" + std::to_string(getpid()) + "-") != std::string::npos;
}

static std::map<CUdeviceptr, Allocation>::iterator containing(CUdeviceptr address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return allocations.end();
    --next;
    return address < next->first + next->second.nbytes ? next : allocations.end();
}

extern "C" {

CUresult cuInit(unsigned flags) { return flags; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, 0; }
CUresult cuDeviceGet(int* device, int ordinal) { return ordinal ? INVALID_VALUE : (*device = 0, 0); }
CUresult cuDeviceGetUuid_v2(unsigned char* uuid, int device) { return memset(uuid, 0x5a, 16), device; }
CUresult cuDeviceGetAttribute(int* value, int, int device) { return *value = 1, device; }
CUresult cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &context_of_device_0, device; }
CUresult cuCtxSetCurrent(void* context) { return current = context, 0; }

static thread_local std::deque<void*> pushed;
CUresult cuCtxPushCurrent_v2(void* context) { return pushed.push_back(current), current = context, 0; }
CUresult cuCtxPopCurrent_v2(void** context) {
    if (pushed.empty()) return INVALID_CONTEXT;
    *context = current, current = pushed.back(), pushed.pop_back();
    return 0;
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    NEEDS_CONTEXT;
    return *least = 0, *greatest = -5, 0;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
    static thread_local char name[32];
    snprintf(name, sizeof name, "STUB_ERROR_%d", error);
    return *text = name, 0;
}

// ---- memory

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t nbytes) {
    NEEDS_CONTEXT;
    const std::string name = fresh("memory");
    void* at = map_file(name, nbytes, true);
    if (at == nullptr) return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> hold(guard);
    *address = reinterpret_cast<CUdeviceptr>(at);
    allocations[*address] = {nbytes, name, false};
    return 0;
}
static CUresult give_back(CUdeviceptr address, bool imported) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> hold(guard);
    auto found = allocations.find(address);
    if (found == allocations.end() || found->second.imported != imported) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), found->second.nbytes);
    allocations.erase(found);
    return 0;
}
CUresult cuMemFree_v2(CUdeviceptr address) { return give_back(address, false); }
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* nbytes, CUdeviceptr address) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> hold(guard);
    auto found = containing(address);
    if (found == allocations.end()) return INVALID_VALUE;
    return *base = found->first, *nbytes = found->second.nbytes, 0;
}
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEEDS_CONTEXT;
    return *free = *total = size_t(1) << 28, 0;
}
CUresult cuPointerGetAttribute(void* value, int number, CUdeviceptr address) {
    std::lock_guard<std::mutex> hold(guard);
    if (containing(address) == allocations.end()) return INVALID_VALUE;
    return *static_cast<int*>(value) = number == 10, 0;
}
CUresult cuMemHostRegister_v2(void* at, size_t nbytes, unsigned flags) {
    NEEDS_CONTEXT;
    const CUdeviceptr start = reinterpret_cast<CUdeviceptr>(at);
    if (flags != 3 || nbytes == 0) return INVALID_VALUE;
    std::lock_guard<std::mutex> hold(guard);
    for (auto& [other, size] : registered)
        if (start < other + size && other < start + nbytes) return ALREADY_REGISTERED;
    registered[start] = nbytes;
    return 0;
}
CUresult cuMemHostUnregister(void* at) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> hold(guard);
    return registered.erase(reinterpret_cast<CUdeviceptr>(at)) ? 0 : NOT_REGISTERED;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* seen, void* at, unsigned) {
    NEEDS_CONTEXT;
    return *seen = reinterpret_cast<CUdeviceptr>(at), 0;
}

// ---- between processes

CUresult cuIpcGetMemHandle(Handle* handle, CUdeviceptr address) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> hold(guard);
    auto found = allocations.find(address);
    if (found == allocations.end() || found->second.imported) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    return strncpy(handle->name, found->second.name.c_str(), 63), 0;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, Handle handle, unsigned flags) {
    NEEDS_CONTEXT;
    const std::string name(handle.name, strnlen(handle.name, 63));
    if (flags != 1 || name.rfind("memory-", 0) != 0) return INVALID_VALUE;
    if (mine(name)) return INVALID_CONTEXT;
    std::lock_guard<std::mutex> hold(guard);
    for (auto& [other, one] : allocations)
        if (one.name == name) return INVALID_VALUE;
    void* at = map_file(name, 0, false);
    if (at == nullptr) return INVALID_VALUE;
    *address = reinterpret_cast<CUdeviceptr>(at);
    allocations[*address] = {size_of_file(name), name, true};
    return 0;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return give_back(address, true); }

// ---- streams

CUresult cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) {
    NEEDS_CONTEXT;
    return flags != 1 ? INVALID_VALUE : (*stream = new Stream, 0);
}
CUresult cuStreamDestroy_v2(Stream* stream) {
    NEEDS_CONTEXT;
    stream->drain();
    {
        std::lock_guard<std::mutex> hold(stream->mutex);
        stream->closed = true;
        stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return 0;
}
CUresult cuStreamSynchronize(Stream* stream) {
    NEEDS_CONTEXT;
    return stream->drain(), 0;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, Stream* stream) {
    NEEDS_CONTEXT;
    stream->add([=] { memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), nbytes); });
    return 0;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t nbytes) {
    NEEDS_CONTEXT;
    return memcpy(reinterpret_cast<void*>(target), source, nbytes), 0;
}
CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t nbytes) {
    NEEDS_CONTEXT;
    return memcpy(target, reinterpret_cast<void*>(source), nbytes), 0;
}
CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t nbytes, Stream* stream) {
    NEEDS_CONTEXT;
    stream->add([=] { memset(reinterpret_cast<void*>(target), value, nbytes); });
    return 0;
}
static bool in_one_place(CUdeviceptr start, size_t nbytes) {
    auto found = containing(start);
    if (found != allocations.end()) return start + nbytes <= found->first + found->second.nbytes;
    for (auto& [first, size] : registered)
        if (first <= start && start + nbytes <= first + size) return true;
    return false;
}
static CUresult batch(
    CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count, Attributes* attributes,
    size_t* first, size_t n_attributes, size_t* failed, Stream* stream) {
    NEEDS_CONTEXT;
    if (n_attributes != 1 || first[0] != 0 || attributes->flags || attributes->source.kind) return INVALID_VALUE;
    if (attributes->order != 1 && attributes->order != 3) return INVALID_VALUE;
    std::lock_guard<std::mutex> hold(guard);
    for (size_t i = 0; i < count; ++i)
        if (!in_one_place(targets[i], sizes[i]) || !in_one_place(sources[i], sizes[i]))
            return *failed = i, INVALID_VALUE;
    for (size_t i = 0; i < count; ++i) cuMemcpyAsync(targets[i], sources[i], sizes[i], stream);
    return 0;
}
CUresult cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t flags, int* found) {
    if (strcmp(name, "cuMemcpyBatchAsync") != 0 || version != 12080 || flags != 0) return *found = 1, 0;
    return *address = reinterpret_cast<void*>(&batch), *found = 0, 0;
}
CUresult cuStreamWaitValue64_v2(Stream* stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 0 || address % 8) return INVALID_VALUE;
    stream->add([=] {
        auto cell = reinterpret_cast<std::atomic<uint64_t>*>(address);
        while (cell->load() < value) std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    return 0;
}

// Not the driver's: launches a kernel that was compiled for the CPU.
CUresult stubLaunch(
    Stream* stream, void (*kernel)(uint64_t, uint64_t, unsigned, unsigned), uint64_t table, uint64_t n_pieces,
    unsigned n_blocks, unsigned n_threads) {
    stream->add([=] { kernel(table, n_pieces, n_blocks, n_threads); });
    return 0;
}

// ---- events

CUresult cuEventCreate(Event** event, unsigned flags) {
    NEEDS_CONTEXT;
    if ((flags & 3) != 3) return INVALID_VALUE;
    const std::string name = fresh("event");
    *event = new Event{static_cast<Marks*>(map_file(name, sizeof(Marks), true)), name, (flags & 4) != 0};
    return 0;
}
CUresult cuEventDestroy_v2(Event* event) {
    NEEDS_CONTEXT;
    return delete event, 0;
}
CUresult cuEventRecord(Event* event, Stream* stream) {
    NEEDS_CONTEXT;
    Marks* marks = event->marks;
    const uint64_t number = ++marks->recorded;
    stream->add([=] { marks->happened = number; });
    return 0;
}
CUresult cuEventQuery(Event* event) {
    NEEDS_CONTEXT;
    return event->marks->happened >= event->marks->recorded ? 0 : NOT_READY;
}
CUresult cuEventSynchronize(Event* event) {
    const uint64_t number = event->marks->recorded;
    while (event->marks->happened < number) std::this_thread::sleep_for(std::chrono::microseconds(20));
    return 0;
}
CUresult cuIpcGetEventHandle(Handle* handle, Event* event) {
    NEEDS_CONTEXT;
    if (!event->shared) return INVALID_HANDLE;
    memset(handle, 0, sizeof *handle);
    return strncpy(handle->name, event->name.c_str(), 63), 0;
}
CUresult cuIpcOpenEventHandle(Event** event, Handle handle) {
    NEEDS_CONTEXT;
    const std::string name(handle.name, strnlen(handle.name, 63));
    if (name.rfind("event-", 0) != 0) return INVALID_HANDLE;
    void* marks = map_file(name, 0, false);
    if (marks == nullptr) return INVALID_HANDLE;
    *event = new Event{static_cast<Marks*>(marks), name, true};
    return 0;
}
}
