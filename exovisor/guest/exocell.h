/* Loops over ranges for C and C++ modules: one source, sequential or parallel by a flag.
 *
 *   sequential: clang --target=wasm32 -O2 -mbulk-memory -nostdlib -Wl,--no-entry x.c
 *   faster:     with -msimd128 -mllvm -force-vector-interleave=2
 *   parallel:   the same with -matomics -Wl,--shared-memory,--import-memory,--max-memory=BYTES
 *
 * The parallel build needs the capability `processes`. How many threads a loop gets is decided
 * when it runs: the host says how many are worth having (THREADS), and a loop that is too short
 * for two stays sequential. Bodies must not write to what another range reads or writes.
 */
#ifndef EXOCELL_H
#define EXOCELL_H

#ifdef __cplusplus
extern "C" {
#endif

/* Most threads that one loop has, the one that runs it included. */
#define EXO_PARTS_MAX 16
/* Bytes of a thread's stack. */
#define EXO_STACK_BYTES 65536

/* Works on [begin, end). Called several times for one `part`, one after the other; parts, which
 * are numbered from 0, at the same time. */
typedef void (*exo_body)(void *context, unsigned begin, unsigned end, unsigned part);

#ifdef __wasm_atomics__

__attribute__((import_module("wasi"), import_name("thread-spawn"))) int exo_spawn(void *start);
__attribute__((import_module("env"), import_name("THREADS"))) unsigned exo_threads(void);

/* The loop that runs. */
static struct {
  exo_body body;
  void *context;
  unsigned parts, least;
} exo_loop;

/* What nobody has taken yet of each part's share: where it begins, and its end in the upper half.
 * Each has lines of the processor's cache to itself. */
static struct {
  _Alignas(128) unsigned long long left;
} exo_shares[EXO_PARTS_MAX];

/*   FREE ──exo_fork──> ASKED ──it runs──> RUNNING ──ranges are done──> STAYING
 *    ^                 │   ^                                          │   │
 *    │        exo_join v   └───────────────── exo_fork ───────────────┘   │
 *    ├───────── NOT_NEEDED ──exo_fork──> ASKED                            │
 *    └──────────────────────────── it ends ───────────────────────────────┘ */
enum { EXO_FREE, EXO_ASKED, EXO_RUNNING, EXO_STAYING, EXO_NOT_NEEDED };

/* What a thread starts with; its entry takes the stack from the first word. */
struct exo_start {
  char *stack_top;
  unsigned part;
  unsigned state;
};

static struct exo_start exo_starts[EXO_PARTS_MAX];
static _Alignas(16) char exo_stacks[EXO_PARTS_MAX][EXO_STACK_BYTES];

static inline int exo_change(struct exo_start *start, unsigned from, unsigned to) {
  return __atomic_compare_exchange_n(&start->state, &from, to, 0, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

/* Cuts a range off a share: half of what is left. Its own part takes the first half, so that in
 * the next loop, too, it has what its processor has in its cache; others take the last. */
static int exo_cut(unsigned of, unsigned part, unsigned *begin, unsigned *end) {
  unsigned long long *share = &exo_shares[of].left;
  unsigned long long seen = __atomic_load_n(share, __ATOMIC_SEQ_CST);
  for (;;) {
    unsigned first = (unsigned)seen, last = (unsigned)(seen >> 32), left = last - first;
    if (!left) return 0;
    unsigned range = left / 2 < exo_loop.least ? exo_loop.least : left / 2;
    if (range > left) range = left;
    *begin = of == part ? first : last - range;
    *end = *begin + range;
    if (of == part) first += range; else last -= range;
    if (__atomic_compare_exchange_n(share, &seen, (unsigned long long)last << 32 | first, 0,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      return 1;
  }
}

/* Works on its own share, then on what is left of others': a thread that is late, or never comes
 * because others want the processors, keeps nobody waiting. */
static void exo_take(unsigned part) {
  unsigned begin, end;
  for (unsigned others = 0; others < exo_loop.parts; others++) {
    unsigned of = (part + others) % exo_loop.parts;
    while (exo_cut(of, part, &begin, &end)) exo_loop.body(exo_loop.context, begin, end, part);
  }
}

/* Looks that a thread takes for its next loop before it ends: about as long as it takes to
 * wake a processor for another one. */
#define EXO_STAY_LOOKS 100000

/* Apart from its entry, which must not use a stack before it has one. */
__attribute__((noinline)) static void exo_thread(struct exo_start *start) {
  unsigned looks = 0;
  for (;;) {
    if (exo_change(start, EXO_ASKED, EXO_RUNNING)) {
      exo_take(start->part);
      __atomic_store_n(&start->state, EXO_STAYING, __ATOMIC_SEQ_CST);
      __builtin_wasm_memory_atomic_notify((int *)&start->state, 1);
      looks = EXO_STAY_LOOKS;
    }
    while (looks && __atomic_load_n(&start->state, __ATOMIC_SEQ_CST) == EXO_STAYING) looks--;
    if (exo_change(start, EXO_STAYING, EXO_FREE) || exo_change(start, EXO_NOT_NEEDED, EXO_FREE))
      return;
  }
}

/* Weak, so that several files can include this one. */
__attribute__((weak, export_name("wasi_thread_start"))) void wasi_thread_start(
    int id, struct exo_start *start) {
  (void)id;
  __asm__ volatile(
      ".globaltype __stack_pointer, i32\n"
      "local.get %0\n"
      "global.set __stack_pointer"
      :
      : "r"(start->stack_top)
      : "memory");
  exo_thread(start);
}

/* Asks for a thread of its own for this part, unless one is still there or on its way. */
static inline void exo_fork(unsigned part) {
  struct exo_start *start = &exo_starts[part];
  if (exo_change(start, EXO_STAYING, EXO_ASKED) || exo_change(start, EXO_NOT_NEEDED, EXO_ASKED))
    return;
  start->stack_top = exo_stacks[part] + EXO_STACK_BYTES;
  start->part = part;
  __atomic_store_n(&start->state, EXO_ASKED, __ATOMIC_SEQ_CST);
  if (exo_spawn(start) < 0) __atomic_store_n(&start->state, EXO_FREE, __ATOMIC_SEQ_CST);
}

/* Looks that are taken, some 10 us, before a thread waits: it is at its last range. */
#define EXO_LOOKS 20000

/* Waits for a thread that has begun. */
static inline void exo_join(unsigned part) {
  struct exo_start *start = &exo_starts[part];
  if (exo_change(start, EXO_ASKED, EXO_NOT_NEEDED)) return;
  for (unsigned looks = EXO_LOOKS; looks; looks--)
    if (__atomic_load_n(&start->state, __ATOMIC_SEQ_CST) != EXO_RUNNING) return;
  while (__atomic_load_n(&start->state, __ATOMIC_SEQ_CST) == EXO_RUNNING)
    __builtin_wasm_memory_atomic_wait32((int *)&start->state, EXO_RUNNING, -1);
}

/* Calls `body` for all of [0, count), cut into ranges, and answers how many parts there may have
 * been. So much as `grain` is worth a thread of its own. Not to be called from within a body. */
static inline unsigned exo_for(exo_body body, void *context, unsigned count, unsigned grain) {
  unsigned most = grain ? count / grain : count;
  unsigned parts = most > 1 ? exo_threads() : 1;
  if (parts > most) parts = most;
  if (parts > EXO_PARTS_MAX) parts = EXO_PARTS_MAX;
  if (parts < 2) {
    body(context, 0, count, 0);
    return 1;
  }
  exo_loop.body = body;
  exo_loop.context = context;
  exo_loop.parts = parts;
  exo_loop.least = grain / 32 + 1;
  for (unsigned part = 0, begin = 0; part < parts; part++) {
    unsigned end = begin + (count - begin) / (parts - part);
    unsigned long long share = (unsigned long long)end << 32 | begin;
    __atomic_store_n(&exo_shares[part].left, share, __ATOMIC_SEQ_CST);
    begin = end;
  }
  for (unsigned part = 1; part < parts; part++) exo_fork(part);
  exo_take(0);
  for (unsigned part = 1; part < parts; part++) exo_join(part);
  return parts;
}

#else

static inline unsigned exo_for(exo_body body, void *context, unsigned count, unsigned grain) {
  (void)grain;
  body(context, 0, count, 0);
  return 1;
}

#endif

#ifdef __cplusplus
}
#endif
#endif
