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
  unsigned count, parts, least;
  atomic_uint next, turn, busy;
} native_loop;

/* Ranges as in exocell.h: the fewer are left, the shorter. */
static void native_take(unsigned part) {
  unsigned begin = atomic_load(&native_loop.next), left;
  while ((left = native_loop.count - begin)) {
    unsigned range = left / (2 * native_loop.parts);
    if (range < native_loop.least) range = native_loop.least;
    if (range > left) range = left;
    if (!atomic_compare_exchange_strong(&native_loop.next, &begin, begin + range)) continue;
    native_loop.body(native_loop.context, begin, begin + range, part);
    begin = atomic_load(&native_loop.next);
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
  native_loop.count = count;
  native_loop.parts = native_parts();
  native_loop.least = grain / 32 + 1;
  atomic_store(&native_loop.busy, native_loop.parts - 1);
  atomic_store(&native_loop.next, 0);
  atomic_fetch_add(&native_loop.turn, 1);
  native_take(0);
  while (atomic_load(&native_loop.busy)) __builtin_ia32_pause();
  return native_loop.parts;
}

#endif
