// Wrappers for Hopper's PTX instructions: barriers, bulk copies, tensor maps, warpgroup products (wgmma),
// and conversions. Needs no header of the CUDA toolkit. PTX ISA 8.x documents every instruction used.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap {  // CUtensorMap
  u64 words[16];
};

DEVICE int lane_id() { return threadIdx.x % 32; }

// ---- element types: storage, bytes, conversion from and to float32 ----

// Conversions process two values at a time: the single-value instruction runs at a sixteenth of the rate.
struct BF16 {
  typedef u16 Storage;
  static constexpr int bytes = 2;
  static DEVICE u32 pack_pair(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE Storage pack(float x) { return u16(pack_pair(x, 0.0f)); }
  static DEVICE float unpack(Storage x) { return __uint_as_float(u32(x) << 16); }
};

struct FP16 {
  typedef u16 Storage;
  static constexpr int bytes = 2;
  static DEVICE u32 pack_pair(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE Storage pack(float x) { return u16(pack_pair(x, 0.0f)); }
  static DEVICE float unpack(Storage x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
};

struct E4M3 {  // saturates at 448; NaN stays NaN
  typedef u8 Storage;
  static constexpr int bytes = 1;
  static DEVICE Storage pack(float x) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
    return u8(y);
  }
  static DEVICE u16 pack_pair(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
  }
};

struct INT8 {  // rounds to nearest even, saturates at -127 and 127; NaN becomes 0
  typedef signed char Storage;
  static constexpr int bytes = 1;
  static DEVICE int whole(float x) { return max(-127, min(127, __float2int_rn(x))); }
  static DEVICE Storage pack(float x) { return Storage(whole(x)); }
  static DEVICE u16 pack_pair(float low, float high) {
    return u16((whole(low) & 0xFF) | (whole(high) << 8));
  }
};

struct FP32 {
  typedef float Storage;
  static constexpr int bytes = 4;
  static DEVICE Storage pack(float x) { return x; }
};

template <class Type>
DEVICE float round_to(float x) {
  return Type::unpack(Type::pack(x));
}

// ---- shared memory, barriers ----

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {  // arrives, and makes the phase wait for `bytes` more
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra leave;\n"
      "bra again;\n"
      "leave:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {  // sees other blocks' writes
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra leave;\n"
      "bra again;\n"
      "leave:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

template <int LENGTH>
struct Ring {  // a position in a ring of LENGTH slots
  int slot = 0;
  u32 parity = 0;
  DEVICE void advance() {
    if (++slot == LENGTH) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- copies into shared memory ----

DEVICE u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE u64 evict_last_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A contiguous block; bytes and both addresses are multiples of 16.
DEVICE void copy_block(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same from shared memory, by the thread that is the one: without a branch, behind which the compiler would take no number
// for one that all threads share. It sees what is stored (shared_fence), and waits for its stores: until they have been read,
// or have been written, too.
DEVICE void store_block(bool is_one, void* target, u32 source, u32 bytes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n}" ::"l"(target),
      "r"(source), "r"(bytes), "r"(u32(is_one))
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEVICE void stores_are_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void stores_are_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A box of a 2-D tensor map, from (column, row); elements outside the tensor arrive as zeros.
DEVICE void copy_box(u32 target, const TensorMap* map, int column, int row, u32 barrier,
                     u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_box(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- programmatic dependent launch ----

DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- warpgroup products ----

// K-major operand with the 128-byte swizzle: rows of 128 bytes, 8 rows an atom of 1024 bytes. The
// address is a multiple of 1024; adding 2 to the descriptor moves 32 bytes along K.
DEVICE u64 operand(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

DEVICE void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int COUNT>
DEVICE void keep_order(float (&d)[COUNT]) {  // the compiler moves no use of d across this
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64 x N] = (add ? d : 0) + a[64 x 32 bytes] b[N x 32 bytes]^T. A thread of warp w holds rows
// 16 w + lane / 4 (+ 8 for d[4 j + 2], d[4 j + 3]), columns 8 j + 2 (lane % 4) (+ 1 for odd).
template <class Input, int N>
struct Product;

#define PRODUCT_1(N, SHAPE, TYPES, TAIL, INPUT, LIST, A, B, P, ...)                               \
  template <>                                                                                   \
  struct Product<INPUT, N> {                                                                    \
    static DEVICE void add(float (&d)[N / 2], u64 a, u64 b, int add) {                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N SHAPE ".f32" TYPES " {" LIST "}, %" #A  \
                   ", %" #B ", p, 1, 1" TAIL ";\n}"                                              \
                   : __VA_ARGS__                                                                \
                   : "l"(a), "l"(b), "r"(add));                                                 \
    }                                                                                           \
  };
#define PRODUCTS(N, LIST, A, B, P, ...)                                                        \
  PRODUCT_1(N, "k32", ".e4m3.e4m3", "", E4M3, LIST, A, B, P, __VA_ARGS__)                       \
  PRODUCT_1(N, "k16", ".bf16.bf16", ", 0, 0", BF16, LIST, A, B, P, __VA_ARGS__)                 \
  PRODUCT_1(N, "k16", ".f16.f16", ", 0, 0", FP16, LIST, A, B, P, __VA_ARGS__)

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D24(i) D16(i), D8(i + 16)
#define D32(i) D16(i), D16(i + 16)
#define D44(i) D32(i), D8(i + 32), D4(i + 40)
#define D64(i) D32(i), D32(i + 32)
#define I4 "%0, %1, %2, %3"
#define I8 I4 ", %4, %5, %6, %7"
#define I12 I8 ", %8, %9, %10, %11"
#define I16 I12 ", %12, %13, %14, %15"
#define I32 \
  I16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define I24 I16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define I44 I32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43"
#define I48 \
  I32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define I60 I48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define I64 I60 ", %60, %61, %62, %63"
#define I128 \
  I64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

PRODUCTS(8, I4, 4, 5, 6, D4(0))
PRODUCTS(16, I8, 8, 9, 10, D8(0))
PRODUCTS(24, I12, 12, 13, 14, D8(0), D4(8))
PRODUCTS(32, I16, 16, 17, 18, D16(0))
PRODUCTS(48, I24, 24, 25, 26, D24(0))
PRODUCTS(64, I32, 32, 33, 34, D32(0))
PRODUCTS(88, I44, 44, 45, 46, D44(0))
PRODUCTS(96, I48, 48, 49, 50, D32(0), D16(32))
PRODUCTS(120, I60, 60, 61, 62, D32(0), D16(32), D8(48), D4(56))
PRODUCTS(128, I64, 64, 65, 66, D64(0))
PRODUCTS(256, I128, 128, 129, 130, D64(0), D64(64))
