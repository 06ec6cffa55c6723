/* Loops over ranges for C and C++ modules: one source, sequential or parallel by a flag.
 *
 *   sequential: clang --target=wasm32 -O2 -mbulk-memory -nostdlib -Wl,--no-entry x.c
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

/* Most ranges that one loop is cut into. */
#define EXO_PARTS_MAX 16
/* Bytes of a thread's stack. */
#define EXO_STACK_BYTES 65536

/* Works on [begin, end); `part` counts the ranges of one loop from 0. */
typedef void (*exo_body)(void *context, unsigned begin, unsigned end, unsigned part);

#ifdef __wasm_atomics__

__attribute__((import_module("wasi"), import_name("thread-spawn"))) int exo_spawn(void *start);
__attribute__((import_module("env"), import_name("THREADS"))) unsigned exo_threads(void);

/* What a thread starts with; its entry takes the stack from the first word. */
struct exo_start {
  char *stack_top;
  exo_body body;
  void *context;
  unsigned begin, end, part;
  int done;
};

static struct exo_start exo_starts[EXO_PARTS_MAX];
static _Alignas(16) char exo_stacks[EXO_PARTS_MAX][EXO_STACK_BYTES];

/* Apart from its entry, which must not use a stack before it has one. */
__attribute__((noinline)) static void exo_thread(struct exo_start *start) {
  start->body(start->context, start->begin, start->end, start->part);
  __atomic_store_n(&start->done, 1, __ATOMIC_SEQ_CST);
  __builtin_wasm_memory_atomic_notify(&start->done, 1);
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

/* Starts a thread on its range; does the range here if there is no thread to be had. */
static inline void exo_fork(struct exo_start *start) {
  start->stack_top = exo_stacks[start->part] + EXO_STACK_BYTES;
  start->done = 0;
  if (exo_spawn(start) < 0) {
    start->body(start->context, start->begin, start->end, start->part);
    start->done = 1;
  }
}

static inline void exo_join(struct exo_start *start) {
  while (__atomic_load_n(&start->done, __ATOMIC_SEQ_CST) == 0)
    __builtin_wasm_memory_atomic_wait32(&start->done, 0, -1);
}

/* Calls `body` for [0, count), cut into ranges of at least `grain`; answers how many there were.
 * Not to be called from within a body. */
static inline unsigned exo_for(exo_body body, void *context, unsigned count, unsigned grain) {
  unsigned most = grain ? count / grain : count;
  unsigned parts = most > 1 ? exo_threads() : 1;
  if (parts > most) parts = most;
  if (parts > EXO_PARTS_MAX) parts = EXO_PARTS_MAX;
  if (parts < 2) {
    body(context, 0, count, 0);
    return 1;
  }
  for (unsigned part = 1; part < parts; part++) {
    struct exo_start *start = &exo_starts[part];
    start->body = body;
    start->context = context;
    start->begin = (unsigned)((unsigned long long)count * part / parts);
    start->end = (unsigned)((unsigned long long)count * (part + 1) / parts);
    start->part = part;
    exo_fork(start);
  }
  body(context, 0, count / parts, 0);
  for (unsigned part = 1; part < parts; part++) exo_join(&exo_starts[part]);
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
