/* exo_for over threads of the host, which look for work and never sleep: what the machine has to
 * give, as a measure of what isolates make of it. */
#ifndef NATIVE_H
#define NATIVE_H

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static struct {
  exo_body body;
  void *context;
  unsigned parts, least;
  atomic_uint turn, busy;
} native_loop;

/* Shares as in exocell.h: halves of what is left, of its own first. */
static struct {
  _Alignas(128) atomic_ullong left;
} native_shares[EXO_PARTS_MAX];

static int native_cut(unsigned of, unsigned part, unsigned *begin, unsigned *end) {
  unsigned long long seen = atomic_load(&native_shares[of].left);
  for (;;) {
    unsigned first = (unsigned)seen, last = (unsigned)(seen >> 32), left = last - first;
    if (!left) return 0;
    unsigned range = left / 2 < native_loop.least ? native_loop.least : left / 2;
    if (range > left) range = left;
    *begin = of == part ? first : last - range;
    *end = *begin + range;
    if (of == part) first += range; else last -= range;
    if (atomic_compare_exchange_strong(&native_shares[of].left, &seen,
                                       (unsigned long long)last << 32 | first))
      return 1;
  }
}

static void native_take(unsigned part) {
  unsigned begin, end;
  for (unsigned others = 0; others < native_loop.parts; others++) {
    unsigned of = (part + others) % native_loop.parts;
    while (native_cut(of, part, &begin, &end))
      native_loop.body(native_loop.context, begin, end, part);
  }
}

static void *native_thread(void *part) {
  for (unsigned seen = 0;;) {
    while (atomic_load(&native_loop.turn) == seen) __builtin_ia32_pause();
    seen++;
    native_take((unsigned)(unsigned long)part);
    atomic_fetch_sub(&native_loop.busy, 1);
  }
  return 0;
}

static unsigned native_parts(void) {
  static unsigned parts;
  if (parts) return parts;
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  unsigned most = processors > EXO_PARTS_MAX ? EXO_PARTS_MAX : (unsigned)processors;
  for (parts = 1; parts < most; parts++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, native_thread, (void *)(unsigned long)parts)) break;
  }
  return parts;
}

static unsigned native_for(exo_body body, void *context, unsigned count, unsigned grain) {
  if (count < 2 * grain || native_parts() < 2) {
    body(context, 0, count, 0);
    return 1;
  }
  native_loop.body = body;
  native_loop.context = context;
  native_loop.parts = native_parts();
  native_loop.least = grain / 32 + 1;
  for (unsigned part = 0, begin = 0; part < native_loop.parts; part++) {
    unsigned end = begin + (count - begin) / (native_loop.parts - part);
    atomic_store(&native_shares[part].left, (unsigned long long)end << 32 | begin);
    begin = end;
  }
  atomic_store(&native_loop.busy, native_loop.parts - 1);
  atomic_fetch_add(&native_loop.turn, 1);
  native_take(0);
  while (atomic_load(&native_loop.busy)) __builtin_ia32_pause();
  return native_loop.parts;
}

#endif
