// Tiles of the hardware, for the translation units that multiply with them; inside the target.

// The numbers of tiles are part of the instructions. GCC 12 does not know that they read and write memory.
#define GSD_MEMORY __asm__ volatile("" ::: "memory")
#define GSD_TILES_0_TO_7(run) run(0) run(1) run(2) run(3) run(4) run(5) run(6) run(7)

struct HardTiles {
  HardTiles() {
    alignas(64) struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes_of_row[16];
      uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.bytes_of_row[tile] = 64, config.rows[tile] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory");  // the compiler knows of its first eight bytes only
    _tile_loadconfig(&config);
  }
  ~HardTiles() { _tile_release(); }

  void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    GSD_MEMORY;
#define GSD_LOAD(tile) \
  if constexpr (T == tile) _tile_loadd(tile, from, stride);
    GSD_TILES_0_TO_7(GSD_LOAD)
  }
  template <int T>
  void store(void* to, int64_t stride) const {
#define GSD_STORE(tile) \
  if constexpr (T == tile) _tile_stored(tile, to, stride);
    GSD_TILES_0_TO_7(GSD_STORE)
    GSD_MEMORY;
  }
  template <int C, int A, int B>
  void add() {
    if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1) _tile_dpbf16ps(1, 5, 6);
    if constexpr (C == 2) _tile_dpbf16ps(2, 4, 7);
    if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
  }
};
