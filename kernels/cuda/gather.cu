// Copies blocks from pinned host memory, which the device reads by address, without the copy engine:
// thousands of scattered blocks in one launch, where one memcpy each would cost microseconds each.
//
// addresses: of `count` blocks, as the device sees them, each on a 16-byte boundary.
// block_bytes: size of a block, a multiple of 16. out: block i goes to out + i * block_bytes.
//
// Each thread has several reads in flight before it writes: what limits this is the latency of the
// bus, not arithmetic. Host memory is read once, so that nothing is kept in the L1 cache.

namespace {

constexpr int kInFlight = 4;

__device__ __forceinline__ uint4 read_once(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

}  // namespace

extern "C" __global__ void gather_blocks(const unsigned long long* __restrict__ addresses,
                                         long long count, long long block_bytes,
                                         uint4* __restrict__ out) {
    const long long words = block_bytes / sizeof(uint4);
    const long long total = count * words;
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long at = first; at < total; at += threads * kInFlight) {
        uint4 held[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const long long word = at + i * threads;
            if (word < total) {
                const uint4* block = reinterpret_cast<const uint4*>(addresses[word / words]);
                held[i] = read_once(block + word % words);
            }
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const long long word = at + i * threads;
            if (word < total) out[word] = held[i];
        }
    }
}
