// A block's part of a layer's weights: which warp holds what, how it enters a product, how it is updated.
//
// Layer L has K_TILES k tiles of 16 inputs. K tile `k * WARPS + warp` belongs to that warp, for all of the block's N_TILES tiles of
// eight units. The fp32 master weights of a 16 x 8 tile have the layout of an mma accumulator: four floats per lane, in registers
// or in shared memory. The same warp multiplies by them in the forward pass, so no copy is needed, and its inputs there are the
// ones that their gradient needs in the backward pass. A product takes a float as the sum of PLANES 16-bit numbers.
#pragma once
#include "exchange.cuh"

enum { IN_REGISTERS, IN_SHARED, IN_DEVICE };  // where tiles are; device memory that only this thread uses stays in L2
template <int N, int MEMORY, int STREAMED = 0> struct Tiles;
template <int N> struct Tiles<N, IN_REGISTERS> {
  float v[N][4];
  INLINE void place(const Context&, u32, u32 = 0) {}
  INLINE void get(int i, float (&t)[4]) const { t[0] = v[i][0], t[1] = v[i][1], t[2] = v[i][2], t[3] = v[i][3]; }
  INLINE void set(int i, const float (&t)[4]) { v[i][0] = t[0], v[i][1] = t[1], v[i][2] = t[2], v[i][3] = t[3]; }
};
template <int N> struct Tiles<N, IN_SHARED> {
  u32 base;
  INLINE void place(const Context& c, u32 at, u32 = 0) { base = c.shared + at + threadIdx.x * 16; }
  INLINE void get(int i, float (&t)[4]) const { load_shared(base + i * (THREADS * 16), t); }
  INLINE void set(int i, const float (&t)[4]) { store_shared(base + i * (THREADS * 16), t); }
};
template <int N> struct Tiles<N, IN_DEVICE> {
  float* base;
  INLINE void place(const Context& c, u32 at) { base = (float*)c.p->exchange + (at / 4 + threadIdx.x * 4); }
  INLINE void get(int i, float (&t)[4]) const {
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(t[0]), "=f"(t[1]), "=f"(t[2]), "=f"(t[3]) : "l"(base + i * (THREADS * 4)));
  }
  INLINE void set(int i, const float (&t)[4]) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(base + i * (THREADS * 4)), "f"(t[0]), "f"(t[1]), "f"(t[2]), "f"(t[3]) : "memory");
  }
};
// In shared memory but for the last STREAMED tiles.
template <int N, int STREAMED> struct Tiles<N, IN_SHARED, STREAMED> {
  Tiles<N, IN_SHARED> near;
  Tiles<N, IN_DEVICE> far;
  INLINE void place(const Context& c, u32 at, u32 at_streamed) {
    near.place(c, at);
    far.place(c, at_streamed);
  }
  INLINE void get(int i, float (&t)[4]) const {
    if (i < N - STREAMED) near.get(i, t);
    else far.get(i - (N - STREAMED), t);
  }
  INLINE void set(int i, const float (&t)[4]) {
    if (i < N - STREAMED) near.set(i, t);
    else far.set(i - (N - STREAMED), t);
  }
};

struct Rates {
  float rate;          // as in optimizers.py, but positive
  float inverse_root;  // as in optimizers.py
  float decay;         // as in optimizers.py
  float row_weight;    // 1 / (rows of the batch * values per row)
};
struct Rule {  // the optimizer's constants, as in optimizers.py
  float momentum, weight_decay, new_mean, new_square, beta2, eps;
};

static_assert(OPTIMIZER == SGD || OPTIMIZER == ADAM || OPTIMIZER == ADAMW || OPTIMIZER == RMSPROP || OPTIMIZER == LION, "step_weight has no rule for this optimizer");
// Root and quotient to 2^-22, in a sixth of the time of the rounded ones. A root below 1e-19 may become 0 and a quotient by such a
// root infinite, which an `eps` that is not TINY_EPS prevents; otherwise numbers that small take eight more instructions.
INLINE float square_root(float v) {
  float root;
  if constexpr (TINY_EPS) asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
  else asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v));
  return root;
}
INLINE float quotient(float a, float b) {
  if constexpr (TINY_EPS) return __fdividef(a, b);
  return a * reciprocal(b);
}
// torch.optim's arithmetic for one number. The states are in the order of the optimizer's `state_names`.
INLINE void step_weight(float& weight, float gradient, float& state0, float& state1, const Rates& r, const Rule& rule) {
  if constexpr (OPTIMIZER == SGD) {
    if constexpr (WEIGHT_DECAY) gradient = fmaf(rule.weight_decay, weight, gradient);
    if constexpr (STATES == 1) {
      state0 = fmaf(rule.momentum, state0, gradient);
      gradient = NESTEROV ? fmaf(rule.momentum, state0, gradient) : state0;
    }
    weight = fmaf(-r.rate, gradient, weight);
  } else if constexpr (OPTIMIZER == ADAM || OPTIMIZER == ADAMW) {
    if constexpr (OPTIMIZER == ADAMW) weight *= r.decay;
    else if constexpr (WEIGHT_DECAY) gradient = fmaf(rule.weight_decay, weight, gradient);
    state0 = fmaf(gradient - state0, rule.new_mean, state0);
    state1 = fmaf(rule.new_square * gradient, gradient, rule.beta2 * state1);
    weight -= r.rate * quotient(state0, fmaf(square_root(state1), r.inverse_root, rule.eps));
  } else if constexpr (OPTIMIZER == RMSPROP) {
    if constexpr (WEIGHT_DECAY) gradient = fmaf(rule.weight_decay, weight, gradient);
    state0 = fmaf(rule.new_square * gradient, gradient, rule.beta2 * state0);
    gradient = quotient(gradient, square_root(state0) + rule.eps);
    if constexpr (STATES == 2) gradient = state1 = fmaf(rule.momentum, state1, gradient);
    weight = fmaf(-r.rate, gradient, weight);
  } else if constexpr (OPTIMIZER == LION) {
    const float mean = fmaf(gradient - state0, rule.new_mean, state0), direction = mean > 0.f ? 1.f : mean < 0.f ? -1.f : 0.f;
    weight = fmaf(-r.rate, direction, weight * r.decay);
    state0 = fmaf(gradient - state0, rule.new_square, state0);
  }
}

// The input of the layer at position `i` of a k tile. uint8 rows are unpacked into even and odd bytes (see Inputs), and the
// weights follow that order.
template <class L> INLINE int input_of(int k_tile, int i) {
  return k_tile * 16 + (L::FIRST && X_BYTES == 1 ? (i & 7) * 2 + (i >> 3) : i);
}

template <class L, bool LOAD> INLINE void move_bias(const Context& c) {
  const int first = L::REPLICATED ? 0 : c.rank * L::UNITS, unit = threadIdx.x;
  if (unit >= L::UNITS) return;
  const bool real = L::BIAS && first + unit < L::OUT;
#pragma unroll
  for (int kind = 0; kind <= STATES; ++kind) {
    float* flat = kind == 0 ? c.p->weights : c.p->state[kind - 1];
    const u32 at = c.shared + L::AT_BIAS + (kind * L::UNITS + unit) * 4;
    if (LOAD) store_float(at, real ? flat[L::BIAS_AT + first + unit] : 0.f);
    else if (real && (!L::REPLICATED || c.rank == 0)) flat[L::BIAS_AT + first + unit] = load_float(at);
  }
}

// N accumulator tiles of weights with their optimizer state and gradient.
template <class L, int N> struct Masters {
  Tiles<N, L::MASTERS_SHARED> master;
  Tiles<(STATES > 0 ? N : 1), L::STATE0_MEMORY, L::STATE0_STREAMED> state0;
  Tiles<(STATES > 1 ? N : 1), L::STATE1_MEMORY, L::STATE1_STREAMED> state1;
  Tiles<(MICRO_BATCHES > 1 ? N : 1), (MICRO_BATCHES > 1)> gradient;

  INLINE void place(const Context& c) {
    master.place(c, L::AT_MASTERS);
    state0.place(c, L::AT_STATE0, L::AT_STREAMED0);
    state1.place(c, L::AT_STATE1, L::AT_STREAMED1);
    gradient.place(c, L::AT_GRADIENTS);
  }
};

template <class L> struct Weights : Masters<L, L::K_TILES_PER_WARP * L::N_TILES> {
  INLINE static bool mine(const Context& c, int k) { return (k + 1) * WARPS <= L::K_TILES || k * WARPS + c.warp < L::K_TILES; }

  // Between the host's flat arrays, in PyTorch's layout ([out][in], then the bias), and the tiles.
  template <bool LOAD, class T> INLINE void move(const Context& c, T& tiles, float* flat) {
    const int first = L::REPLICATED ? 0 : c.rank * L::UNITS;
#pragma unroll
    for (int k = 0; k < L::K_TILES_PER_WARP; ++k)
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) {
        float t[4];
        if (!LOAD) tiles.get(k * L::N_TILES + n, t);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k_tile = k * WARPS + c.warp, in = input_of<L>(k_tile, c.g + (e >> 1) * 8), out = first + n * 8 + c.q * 2 + (e & 1);
          const bool real = k_tile < L::K_TILES && in < L::IN && out < L::OUT;
          float* at = flat + L::WEIGHT_AT + (u64)out * L::IN + in;
          if (LOAD) t[e] = real ? *at : 0.f;
          else if (real && (!L::REPLICATED || c.rank == 0)) *at = t[e];
        }
        if (LOAD) tiles.set(k * L::N_TILES + n, t);
      }
  }
  template <bool LOAD> INLINE void move_all(const Context& c) {
    if (LOAD) this->place(c);
    move<LOAD>(c, this->master, c.p->weights);
    if constexpr (STATES > 0) move<LOAD>(c, this->state0, c.p->state[0]);
    if constexpr (STATES > 1) move<LOAD>(c, this->state1, c.p->state[1]);
    move_bias<L, LOAD>(c);
  }
};

// Sends the 16-bit copies of a k tile's new weights to the blocks that own its inputs, which need them in the backward pass.
// `count` is the number of the update.
template <class L> INLINE void send_back(const Context& c, u32 count, int k_tile, const float (&t)[L::N_TILES][4]) {
  if constexpr (!L::FIRST) {
    constexpr int TILES = L::IN_TILES;  // of eight inputs that a block owns
    const int first = c.rank * L::N_TILES;  // of this block's tiles of units among all
    u32 words[L::N_TILES * 2][PLANES];
#pragma unroll
    for (int n = 0; n < L::N_TILES; ++n) {
      split(t[n][0], t[n][1], words[n * 2]);
      split(t[n][2], t[n][3], words[n * 2 + 1]);
    }
    auto owner = [&](int i) { return (k_tile * 2 + (i & 1)) / TILES; };
    auto index = [&](int i, int plane) { return (plane * TILES + (k_tile * 2 + (i & 1)) % TILES) * (L::NEXT_K_TILES * 2) + first + i / 2; };
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
#if IS_CLUSTER
#pragma unroll
      for (int i = 0; i < L::N_TILES * 2; i += 4) {
        u32 to[4], at[4], four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int j = i + k < L::N_TILES * 2 ? i + k : i;
          to[k] = i + k < L::N_TILES * 2 ? owner(j) : BLOCKS, at[k] = index(j, plane), four[k] = words[j][plane];
        }
        send_four_right<L::BACK_EXCHANGE, L::AT_BACK, L::BACK_BYTES>(c, count, to, at, four);
      }
#else
#pragma unroll
      for (int i = 0; i < L::N_TILES * 2; ++i)
        if (owner(i) < BLOCKS) send_right<L::AT_BACK, L::BACK_BYTES>(c, count, owner(i), index(i, plane), words[i][plane]);
#endif
    }
  }
}
template <class L> INLINE void send_all_back(const Context& c, const Weights<L>& w, u32 count) {
  if constexpr (!L::FIRST)
#pragma unroll
    for (int k = 0; k < L::K_TILES_PER_WARP; ++k)
      if (Weights<L>::mine(c, k)) {
        float t[L::N_TILES][4];
#pragma unroll
        for (int n = 0; n < L::N_TILES; ++n) w.master.get(k * L::N_TILES + n, t[n]);
        send_back<L>(c, count, k * WARPS + c.warp, t);
      }
}

// The block's deltas of a row tile and a tile of units, as the right operand whose k are the rows.
template <class L> INLINE void read_delta(const Context& c, int plane, int m, int n, u32 (&w)[2]) {
  load_transposed(c.shared + L::AT_DELTA + ((plane * ROW_TILES + m) * L::N_TILES + n) * 256 + (c.lane & 15) * 16, w);
}

// The optimizer state of N neighbouring tiles, read before their gradient is computed.
template <int N> struct States {
  float state0[N][4], state1[N][4];
  template <class W> INLINE void read(const W& w, int first, int count = N, bool with_state1 = true) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= count) break;
      if constexpr (STATES > 0) w.state0.get(first + i, state0[i]);
      if (STATES > 1 && with_state1) w.state1.get(STATES > 1 ? first + i : 0, state1[i]);
    }
  }
};
// Updates tile `i`, the `place`-th of those in `states`, by its finished gradient; returns the new weights in `weight`.
template <class W, int N> INLINE void step_tile(W& w, int i, States<N>& states, int place, const float (&gradient)[4], float scale, float (&weight)[4], const Rates& rates, const Rule& rule) {
  w.master.get(i, weight);
#pragma unroll
  for (int e = 0; e < 4; ++e) step_weight(weight[e], gradient[e] * scale, states.state0[place][e], states.state1[place][e], rates, rule);
  w.master.set(i, weight);
  if constexpr (STATES > 0) w.state0.set(i, states.state0[place]);
  if constexpr (STATES > 1) w.state1.set(i, states.state1[place]);
}
template <class W> INLINE void step_tile(W& w, int i, const float (&gradient)[4], float scale, float (&weight)[4], const Rates& rates, const Rule& rule) {
  States<1> states;
  states.read(w, i);
  step_tile(w, i, states, 0, gradient, scale, weight, rates, rule);
}
template <class L> INLINE void step_bias(const Context& c, const Rates& rates, const Rule& rule, bool first, bool last) {
  const u32 unit = THREADS - 1 - threadIdx.x;  // the last warp has the fewest tiles
  if (!L::BIAS || unit >= L::UNITS) return;
  const u32 sums = c.shared + L::AT_BIAS_SUMS, at = c.shared + L::AT_BIAS + unit * 4;
  float gradient = 0.f, s0 = 0.f, s1 = 0.f;
#pragma unroll 8
  for (int half = 0; half < ROW_TILES * 2; ++half) gradient += load_float(sums + (half * L::UNITS + unit) * 4);
  if constexpr (MICRO_BATCHES > 1) {
    const u32 so_far = sums + (ROW_TILES * 2 * L::UNITS + unit) * 4;
    if (!first) gradient += load_float(so_far);
    if (!last) {
      store_float(so_far, gradient);
      return;
    }
  }
  float bias = load_float(at);
  if constexpr (STATES > 0) s0 = load_float(at + L::UNITS * 4);
  if constexpr (STATES > 1) s1 = load_float(at + 2 * L::UNITS * 4);
  step_weight(bias, gradient * BIAS_SCALE, s0, s1, rates, rule);
  store_float(at, bias);
  if constexpr (STATES > 0) store_float(at + L::UNITS * 4, s0);
  if constexpr (STATES > 1) store_float(at + 2 * L::UNITS * 4, s1);
}

// The gradient of the warp's weights from its inputs and the block's deltas, and the update. `read` gives the inputs of a row tile,
// a k tile and a plane as the left mma operand, whose reduction dimension runs over the batch rows. `first`, `last`: micro-batch of the step. `count`: number of the
// update.
template <class L, class Read> INLINE void update(Context& c, Weights<L>& w, const Rates& rates, const Rule& rule, bool first, bool last, u32 count, Read read) {
  constexpr bool KEEP = ROW_TILES <= 4 && ROW_TILES * L::N_TILES * PLANES <= 8;  // keep the deltas in registers for all k tiles
  u32 kept[KEEP ? ROW_TILES * L::N_TILES * PLANES : 1][2];
  if constexpr (KEEP)
#pragma unroll
    for (int i = 0; i < ROW_TILES * L::N_TILES * PLANES; ++i) read_delta<L>(c, 0, 0, i, kept[i]);
  // The state of a k tile is read while the one before is computed, as far as there are registers.
  constexpr bool AHEAD = L::N_TILES * STATES <= 4 && MICRO_BATCHES == 1;
  // The last k tile's state comes from L2, which takes as long as several k tiles: it is read first.
  constexpr int LAST = L::K_TILES_PER_WARP - 1;
  constexpr bool EARLY = AHEAD && LAST > 0 && L::STATE0_STREAMED == 0 && L::STATE1_STREAMED == L::N_TILES;
  States<L::N_TILES> states, next;
  float early[EARLY ? L::N_TILES : 1][4];
  if constexpr (EARLY)
    if (Weights<L>::mine(c, LAST))
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) w.state1.get(LAST * L::N_TILES + n, early[n]);
  if constexpr (AHEAD) next.read(w, 0);
#pragma unroll
  for (int k = 0; k < L::K_TILES_PER_WARP; ++k)
    if (Weights<L>::mine(c, k)) {
      float gradient[L::N_TILES][4], weights[L::N_TILES][4];
      states = next;
      if constexpr (!AHEAD) states.read(w, k * L::N_TILES);
      else if (k < LAST) next.read(w, (k + 1) * L::N_TILES, L::N_TILES, !(EARLY && k + 1 == LAST));
      if constexpr (EARLY)
        if (k == LAST)
#pragma unroll
          for (int n = 0; n < L::N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) states.state1[n][e] = early[n][e];
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) {
        clear(gradient[n]);
        if (MICRO_BATCHES > 1 && !first) w.gradient.get(k * L::N_TILES + n, gradient[n]);
      }
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
      for (int m = 0; m < ROW_TILES; ++m) {
        u32 left[L::IN_PLANES][4];
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane) read(m, k, plane, left[plane]);
#pragma unroll
        for (int n = 0; n < L::N_TILES; ++n)
#pragma unroll
          for (int right = 0; right < PLANES; ++right) {
            u32 delta[2];
            if constexpr (KEEP) delta[0] = kept[(right * ROW_TILES + m) * L::N_TILES + n][0], delta[1] = kept[(right * ROW_TILES + m) * L::N_TILES + n][1];
            else read_delta<L>(c, right, m, n, delta);
#pragma unroll
            for (int plane = 0; plane < L::IN_PLANES; ++plane)
              if (plane + right < PLANES) multiply_add(gradient[n], left[plane], delta[0], delta[1]);
          }
      }
      if (MICRO_BATCHES > 1 && !last) {
#pragma unroll
        for (int n = 0; n < L::N_TILES; ++n) w.gradient.set(k * L::N_TILES + n, gradient[n]);
        continue;
      }
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) step_tile(w, k * L::N_TILES + n, states, n, gradient[n], L::GRADIENT_SCALE, weights[n], rates, rule);
      send_back<L>(c, count, k * WARPS + c.warp, weights);
    }
  step_bias<L>(c, rates, rule, first, last);
}
