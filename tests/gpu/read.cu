// Reads a buffer as fast as the memory gives it: what timings are compared with.
extern "C" __global__ void __launch_bounds__(512)
read_all(const unsigned char* buffer, float* out, long long chunks) {
    const uint4* data = reinterpret_cast<const uint4*>(buffer);
    const long long step = (long long)gridDim.x * blockDim.x;
    unsigned found = 0;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < chunks; i += 8 * step) {
        uint4 loaded[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) loaded[j] = __ldcs(data + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; ++j) found |= loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
    }
    if (found == 0x12345678u) out[0] = 1.0f;
}
