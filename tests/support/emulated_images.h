// What images.cu uses of CUDA and of plugins/backends/cuda/sm90/, for one thread after another. Reads and writes outside of
// the arrays end the process.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE inline
using std::max;
using std::min;
struct uint4 { u32 x, y, z, w; };
struct Index { u32 x; };
static Index threadIdx, blockIdx, gridDim;
struct BF16 { typedef u16 Storage; static constexpr int bytes = 2; static float unpack(u16) { return 0; } };
struct FP16 { typedef u16 Storage; static constexpr int bytes = 2; static float unpack(u16) { return 0; } };
struct E4M3 { typedef u8 Storage; static constexpr int bytes = 1; };
inline void launch_dependents() {}
inline void wait_for_dependencies() {}

struct Array {
  const u8 *begin, *end;
  void check(const void* at, const char* what) const {
    const u8* p = static_cast<const u8*>(at);
    if (p >= begin && p + 16 <= end && uintptr_t(p) % 16 == 0) return;
    std::fprintf(stderr, "%s at %td of %td bytes\n", what, p - begin, end - begin);
    std::abort();
  }
};
static Array cache_bytes, image_bytes;

inline u32 half_of(u8 x) {  // e4m3 as float16
  if ((x & 127) == 127) return 0x7fff;
  const int exponent = x >> 3 & 15, digits = x & 7;
  const double y = exponent ? std::ldexp(8 + digits, exponent - 10) : std::ldexp(digits, -9);
  if (y == 0) return u32(x >> 7) << 15;
  const int power = std::ilogb(y);
  return u32(x >> 7) << 15 | u32(power + 15) << 10 | u32(std::ldexp(y, 10 - power)) % 1024;
}
