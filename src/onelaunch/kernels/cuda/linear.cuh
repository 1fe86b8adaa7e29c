// y = act(z), z = x · Wᵀ + b, in bf16 or fp16, on Hopper; also stores z where STORE_Z.
//
// A persistent block walks over tiles of y. One warp loads tiles of x and W by TMA. Each of two warp groups multiplies half of the
// rows. Three more warps apply the activation to a finished tile while the next one is multiplied, so that the tensor cores wait
// for no exponential. They read z rounded to 16 bits, as the activation of a 16-bit model does. After the last tile there is
// nothing to overlap with: the warp groups that multiplied it also finish it, from fp32, and store it box by box.
// The blocks of a cluster have tiles below each other and use the same tile of W: each block loads a part of it for all.
#pragma once
#include "copy_engine.cuh"
#include "epilogue.cuh"
#include "tensor_cores.cuh"

constexpr int GROUPS = TILE_M / 64;  // warp groups that multiply
constexpr int ROW_BYTES = TILE_K * 2;
constexpr int X_BYTES = TILE_M * ROW_BYTES, W_BYTES = TILE_N * ROW_BYTES;
constexpr int W_ROWS = TILE_N / CLUSTER;  // rows of W that a block loads for its cluster
constexpr int BOX_BYTES = BOX * BOX * 2, BOXES = TILE_N / BOX;  // y is stored in boxes of 64 x 64
constexpr int FINISHERS = 96;  // threads that finish tiles; the other 32 of the first 128 load tiles
constexpr bool AT_ONCE = ACTIVATION == NONE || ACTIVATION == RELU;  // costs nothing in the epilogue
constexpr bool BIAS_AHEAD = !STORE_Z || TILE_N < 256;  // load the bias into registers during the products, if there are enough
static_assert(!STORE_Z || !AT_ONCE, "z is stored for activations whose derivative needs it");
static_assert(GROUPS == 2 && TILE_K == 64 && BOX == 64 && THREADS == 128 * (1 + GROUPS), "sizes that the code below assumes");
static_assert(TILE_N % BOX == 0 && W_ROWS % 8 == 0, "boxes and swizzled rows");

struct Shared {
    u8 x[STAGES][X_BYTES];
    u8 w[STAGES][W_BYTES];
    u8 y[GROUPS][BOXES][BOX_BYTES];
    u16 bias[STAGES + 1][TILE_N];  // the loads are at most STAGES tiles ahead
    u64 full[STAGES], empty[STAGES];
    u64 ready[GROUPS], taken[GROUPS];  // of y
};

static_assert(sizeof(Shared) + 1024 == SHARED_BYTES, "Tile.shared_bytes in linear_hopper.py must be the same");

// A position in a ring of N, and the parity of its barrier.
template <int N>
struct Turn {
    int position = 0;
    u32 parity = 0;
    INLINE void next() {
        if (++position == N) position = 0, parity ^= 1;
    }
};

struct Corner {
    int row, column;  // of y
};

// The tiles of this cluster, in bands of BAND row tiles, so that concurrent clusters share operands in L2.
struct Tiles {
    int down, across, index;  // `down` counts tiles of clusters
    Corner first;  // computed, with divisions, before the first wait: the compiler must not move it to its use
    INLINE Tiles(int m, int n) {
        down = (m + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER);
        across = (n + TILE_N - 1) / TILE_N;
        index = blockIdx.x / CLUSTER;
        first = find();
        asm volatile("" : "+r"(first.row), "+r"(first.column));
    }
    INLINE int step() const { return gridDim.x / CLUSTER; }
    INLINE bool left() const { return index < down * across; }
    INLINE bool last() const { return index + step() >= down * across; }
    INLINE void next() { index += step(); }
    INLINE Corner corner() const { return index == blockIdx.x / CLUSTER ? first : find(); }
    INLINE Corner find() const {
        const int band = index / (BAND * across), within = index % (BAND * across);
        const int height = min(down - band * BAND, BAND);
        const int row = (band * BAND + within % height) * CLUSTER + blockIdx.x % CLUSTER;
        return {row * TILE_M, within / height * TILE_N};
    }
};

INLINE void load_tiles(
    Shared& shared, Tiles tiles, const TensorMap& x_map, const TensorMap& w_map, const u16* bias, int n, int k
) {
    const int row = blockIdx.x % CLUSTER * W_ROWS;
    Turn<STAGES> turn;
    Turn<STAGES + 1> slot;
    for (; tiles.left(); tiles.next(), slot.next()) {
        const Corner corner = tiles.corner();
        for (int start = 0; start < k; start += TILE_K, turn.next()) {
            u64* full = &shared.full[turn.position];
            barrier_wait(&shared.empty[turn.position], turn.parity ^ 1);
            const int bias_bytes = BIASED && start == 0 ? min(TILE_N, n - corner.column) * 2 : 0;
            if (elected()) {
                barrier_expect(full, X_BYTES + W_BYTES + bias_bytes);
                load_tile(shared.x[turn.position], x_map, full, start, corner.row);
                load_tile_to<CLUSTER>(shared.w[turn.position] + row * ROW_BYTES, w_map, full, start, corner.column + row);
                if (bias_bytes) load_bytes(shared.bias[slot.position], bias + corner.column, bias_bytes, full);
            }
            __syncwarp();
        }
    }
    // Wait until all blocks have released all stages: a block that has exited cannot be arrived at.
    for (int stage = 0; CLUSTER > 1 && stage < STAGES; ++stage, turn.next()) {
        barrier_wait(&shared.empty[turn.position], turn.parity ^ 1);
    }
}

// The products of one tile by one warp group, over all of k. `meanwhile` runs during the last of them.
template <class Meanwhile>
INLINE void multiply_tile(
    Shared& shared, float (&z)[TILE_N / 2], Turn<STAGES>& turn, int k, int group, Meanwhile meanwhile
) {
    const int thread = threadIdx.x % 128;
    int before = 0;
#pragma unroll 1
    for (int start = 0; start < k; start += TILE_K) {
        barrier_wait(&shared.full[turn.position], turn.parity);
        const u64 x = matrix(shared.x[turn.position] + group * 64 * ROW_BYTES), w = matrix(shared.w[turn.position]);
        products_begin();
#pragma unroll
        for (int k16 = 0; k16 < TILE_K / 16; ++k16) multiply(z, x + k16 * 2, w + k16 * 2, start > 0 || k16 > 0);
        products_commit();
        products_wait<1>();  // the stage before has been read by all four warps, which wgmma synchronises: it is free
        if (start > 0 && thread < CLUSTER) barrier_arrive_at(&shared.empty[before], thread);
        before = turn.position;
        turn.next();
    }
    meanwhile();
    products_wait<0>();
    products_written(z);
    if (thread < CLUSTER) barrier_arrive_at(&shared.empty[before], thread);
}

// The bias of this thread's part of COLUMNS columns.
template <int COLUMNS>
INLINE void load_bias(u32* bias, const u16* from) {
#pragma unroll
    for (int i = 0; BIASED && i < COLUMNS / 8; ++i) bias[i] = *reinterpret_cast<const u32*>(from + i * 8 + threadIdx.x % 4 * 2);
}

// Bias and activation of this thread's part of 64 columns of a tile, stored into a box of shared memory.
template <int KIND>
INLINE void fill_box(const float* z, const u32* bias, u8* box) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const u32 to = shared_address(box) + (thread / 32 * 16 + lane % 16) * BOX * 2;
#pragma unroll
    for (int i = 0; i < BOX / 16; ++i) {
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low = z[i * 8 + j * 2], high = z[i * 8 + j * 2 + 1];
            if constexpr (BIASED) low += low_of(bias[i * 2 + j / 2]), high += high_of(bias[i * 2 + j / 2]);
            pairs[j] = finish_pair<KIND, true>(low, high);
        }
        store_matrices(to + ((i * 2 + lane / 16) ^ (lane % 8)) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// Stores all boxes of a warp group's part of a tile; called by one thread.
INLINE void store_boxes(Shared& shared, const TensorMap& map, Corner corner, int n, int group) {
    for (int box = 0; box < BOXES && corner.column + box * BOX < n; ++box) {
        store_tile(map, shared.y[group][box], corner.column + box * BOX, corner.row + group * 64);
    }
    commit_stores();
}

INLINE void multiply_tiles(Shared& shared, Tiles tiles, const TensorMap& y_map, const TensorMap& z_map, int n, int k, int warp) {
    const int group = warp / 4;
    const bool leads = warp % 4 == 0;  // its elected thread stores
    Turn<STAGES> turn;
    Turn<STAGES + 1> slot;
    u32 parity = 0;
    float z[TILE_N / 2];
    for (; tiles.left(); tiles.next(), slot.next(), parity ^= 1) {
        const u16* all_bias = shared.bias[slot.position];
        u32 bias[(BIAS_AHEAD ? TILE_N : BOX) / 8];
        u8(*boxes)[BOX_BYTES] = shared.y[group];
        multiply_tile(shared, z, turn, k, group, [&] {
            barrier_wait(&shared.taken[group], parity ^ 1);
            if constexpr (BIAS_AHEAD) load_bias<TILE_N>(bias, all_bias);
        });
        auto bias_of = [&](int box) -> const u32* {
            if constexpr (BIAS_AHEAD) return bias + box * BOX / 8;
            load_bias<BOX>(bias, all_bias + box * BOX);
            return bias;
        };
        if (STORE_Z || !tiles.last()) {
            constexpr int FIRST = AT_ONCE ? ACTIVATION : NONE;
#pragma unroll
            for (int box = 0; box < BOXES; ++box) fill_box<FIRST>(z + box * BOX / 2, bias_of(box), boxes[box]);
            if constexpr (STORE_Z || AT_ONCE) fence_before_copies();  // otherwise the finishing warps rewrite every byte
        }
        if (!tiles.last()) {
            barrier_arrive(&shared.ready[group]);
            continue;
        }
        const Corner corner = tiles.corner();
        if constexpr (STORE_Z) {
            sync_threads<128>(2 + group);
            if (leads && elected()) store_boxes(shared, z_map, corner, n, group), wait_until_read<0>();
            sync_threads<128>(2 + group);
        }
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            fill_box<ACTIVATION>(z + box * BOX / 2, bias_of(box), boxes[box]);
            fence_before_copies();
            sync_threads<128>(2 + group);
            if (leads && corner.column + box * BOX < n && elected()) {
                store_tile(y_map, boxes[box], corner.column + box * BOX, corner.row + group * 64);
            }
        }
        if (leads && elected()) commit_stores(), wait_until_read<0>();
    }
}

INLINE void finish_tiles(Shared& shared, Tiles tiles, const TensorMap& y_map, const TensorMap& z_map, int n, int warp) {
    const int thread = threadIdx.x - (128 - FINISHERS);
    const bool leads = warp == 1;
    u32 parity = 0;
    for (; !tiles.last(); tiles.next(), parity ^= 1) {
        const Corner corner = tiles.corner();
        for (int group = 0; group < GROUPS; ++group) {
            barrier_wait(&shared.ready[group], parity);
            if constexpr (STORE_Z) {
                if (leads && elected()) store_boxes(shared, z_map, corner, n, group), wait_until_read<0>();
                sync_threads<FINISHERS>(1);
            }
            if constexpr (!AT_ONCE) {
                uint4* quads = reinterpret_cast<uint4*>(shared.y[group][0]);
#pragma unroll 2
                for (int i = thread; i < BOXES * BOX_BYTES / 16; i += FINISHERS) {
                    uint4 quad = quads[i];
                    quad.x = finish_pair<ACTIVATION>(quad.x), quad.y = finish_pair<ACTIVATION>(quad.y);
                    quad.z = finish_pair<ACTIVATION>(quad.z), quad.w = finish_pair<ACTIVATION>(quad.w);
                    quads[i] = quad;
                }
                fence_before_copies();
            }
            sync_threads<FINISHERS>(1);  // even without work: a thread two tiles behind would mistake the parity
            if (leads && elected()) store_boxes(shared, y_map, corner, n, group);
        }
        if (leads && elected()) {
            wait_until_read<1>();
            barrier_arrive(&shared.taken[0]);
            wait_until_read<0>();
            barrier_arrive(&shared.taken[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap y_map,
    const __grid_constant__ TensorMap z_map, const u16* bias, long long m, long long n, long long k
) {
    extern __shared__ u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
    release_next();
    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map), prefetch_map(y_map);
        if constexpr (STORE_Z) prefetch_map(z_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], GROUPS * CLUSTER);
        }
        for (int group = 0; group < GROUPS; ++group) {
            barrier_init(&shared.ready[group], 128);
            barrier_init(&shared.taken[group], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const Tiles tiles(m, n);
    sync_cluster<CLUSTER>();
    wait_for_previous();
    // Broadcast from one lane, so that ptxas knows it is uniform in a warp: descriptors and copy addresses are then free.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        release_registers<88>();
        if (warp == 0) load_tiles(shared, tiles, x_map, w_map, bias, n, k);
        else finish_tiles(shared, tiles, y_map, z_map, n, warp);
    } else {
        acquire_registers<208>();
        multiply_tiles(shared, tiles, y_map, z_map, n, k, warp - 4);
    }
}
