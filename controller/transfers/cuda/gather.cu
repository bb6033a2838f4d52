// Moves many pieces of bytes at once, each from its own source to its own target: between strided planes
// on the device and pinned host frames, in either direction. A warp takes a piece at a time.
//
// Needs no headers and no intrinsics: it compiles with NVRTC and nvcc, and, with blockIdx and its kin as
// plain variables, with a C++ compiler for tests of its index arithmetic without a device.

typedef unsigned long long u64;

struct alignas(16) Vector {
    u64 low, high;
};

#define LANES 32
#define UNROLLED 4

// Bytes [0, nbytes) by elements of T, both ends aligned to it; this lane's share. Loads first, then stores:
// over PCIe it is the loads in flight that make the speed.
template <typename T>
__device__ inline u64 move_by(unsigned char* target, const unsigned char* source, u64 nbytes, unsigned lane) {
    const u64 n_elements = nbytes / sizeof(T);
    const T* from = reinterpret_cast<const T*>(source);
    T* to = reinterpret_cast<T*>(target);
    u64 i = lane;
    for (; i + (UNROLLED - 1) * LANES < n_elements; i += UNROLLED * LANES) {
        T held[UNROLLED];
#pragma unroll
        for (int k = 0; k < UNROLLED; ++k) held[k] = from[i + k * LANES];
#pragma unroll
        for (int k = 0; k < UNROLLED; ++k) to[i + k * LANES] = held[k];
    }
    for (; i < n_elements; i += LANES) to[i] = from[i];
    return n_elements * sizeof(T);
}

// One piece: single bytes up to where the target is aligned, the widest elements that both sides allow, and
// single bytes for what is left.
__device__ inline void move_piece(unsigned char* target, const unsigned char* source, u64 nbytes, unsigned lane) {
    const u64 apart = reinterpret_cast<u64>(target) ^ reinterpret_cast<u64>(source);
    const u64 width = apart % 16 == 0 ? 16 : apart % 8 == 0 ? 8 : apart % 4 == 0 ? 4 : 1;
    u64 head = (width - reinterpret_cast<u64>(target) % width) % width;
    if (head > nbytes) head = nbytes;
    move_by<unsigned char>(target, source, head, lane);
    target += head, source += head, nbytes -= head;
    u64 moved = 0;
    if (width == 16) moved = move_by<Vector>(target, source, nbytes, lane);
    if (width == 8) moved = move_by<u64>(target, source, nbytes, lane);
    if (width == 4) moved = move_by<unsigned>(target, source, nbytes, lane);
    move_by<unsigned char>(target + moved, source + moved, nbytes - moved, lane);
}

// table: n_pieces sources, then as many targets, then as many sizes.
extern "C" __global__ void hicache_move(const u64* table, u64 n_pieces) {
    const unsigned lane = threadIdx.x % LANES;
    const u64 first = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    const u64 step = u64(gridDim.x) * blockDim.x / LANES;
    for (u64 i = first; i < n_pieces; i += step) {
        move_piece(
            reinterpret_cast<unsigned char*>(table[n_pieces + i]),
            reinterpret_cast<const unsigned char*>(table[i]),
            table[2 * n_pieces + i],
            lane);
    }
}
