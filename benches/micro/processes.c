/* Processes: making them, and passing a byte between them. */
#define _GNU_SOURCE
#include "micro.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define RING_MAX 16

static uint64_t fork_each(long count, void (*body)(void))
{
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++) {
		pid_t child = must(fork(), "fork");

		if (child == 0) {
			if (body)
				body();
			_exit(body ? 127 : 0);
		}
		reap(child);
	}
	return now_ns() - start;
}

static void exec_own(void)
{
	execl(own_copy, own_copy, "exit", NULL);
}

static void exec_shell(void)
{
	execl("/bin/sh", "sh", "-c", ":", NULL);
}

static uint64_t fork_exit(long count)
{
	return fork_each(count, NULL);
}

static uint64_t fork_exec(long count)
{
	return fork_each(count, exec_own);
}

static uint64_t fork_sh(long count)
{
	return fork_each(count, exec_shell);
}

static void pass(int from, int to)
{
	char c = 0;

	if (read(from, &c, 1) != 1 || write(to, &c, 1) != 1)
		_exit(0);
}

/* Reads and writes until the other end is closed. */
static pid_t echoes(int from, int to, int unused_a, int unused_b)
{
	pid_t child = must(fork(), "fork");

	if (child)
		return child;
	close(unused_a);
	close(unused_b);
	for (;;)
		pass(from, to);
}

static uint64_t round_trips(int to, int from, long count)
{
	char c = 'x';
	uint64_t start = now_ns();

	for (long i = 0; i < count; i++) {
		must(write(to, &c, 1), "write");
		must(read(from, &c, 1), "read");
	}
	return now_ns() - start;
}

static uint64_t pipe_rt(long count)
{
	int there[2], back[2];
	pid_t child;
	uint64_t ns;

	must(pipe(there), "pipe");
	must(pipe(back), "pipe");
	child = echoes(there[0], back[1], there[1], back[0]);
	close(there[0]);
	close(back[1]);
	ns = round_trips(there[1], back[0], count);
	close(there[1]);
	close(back[0]);
	reap(child);
	return ns;
}

static uint64_t socket_rt(int near, int far, long count)
{
	pid_t child = echoes(far, far, near, -1);
	uint64_t ns;

	close(far);
	ns = round_trips(near, near, count);
	close(near);
	reap(child);
	return ns;
}

static uint64_t unix_rt(long count)
{
	int pair[2];

	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair");
	return socket_rt(pair[0], pair[1], count);
}

/* TCP over the loopback device. */
static uint64_t inet_rt(long count)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = must(socket(AF_INET, SOCK_STREAM, 0), "socket"), near, far, one = 1;

	must(bind(listener, (void *)&address, length), "bind");
	must(listen(listener, 1), "listen");
	must(getsockname(listener, (void *)&address, &length), "getsockname");
	near = must(socket(AF_INET, SOCK_STREAM, 0), "socket");
	must(connect(near, (void *)&address, length), "connect");
	far = must(accept(listener, NULL, NULL), "accept");
	close(listener);
	setsockopt(near, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	setsockopt(far, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	return socket_rt(near, far, count);
}

/*
 * A token goes around a ring of processes joined by pipes; the time of one hop,
 * the pipe's calls included. The processes do nothing else.
 */
static uint64_t ring(int size, long hops)
{
	int pipes[RING_MAX][2];
	pid_t children[RING_MAX];
	long rounds = (hops + size - 1) / size;
	uint64_t ns;

	for (int i = 0; i < size; i++)
		must(pipe(pipes[i]), "pipe");
	for (int i = 1; i < size; i++) {
		children[i] = must(fork(), "fork");
		if (children[i] == 0) {
			for (int j = 0; j < size; j++) {
				if (j != i)
					close(pipes[j][0]);
				if (j != (i + 1) % size)
					close(pipes[j][1]);
			}
			for (;;)
				pass(pipes[i][0], pipes[(i + 1) % size][1]);
		}
	}
	for (int i = 1; i < size; i++)
		close(pipes[i][0]);
	for (int i = 0; i < size; i++)
		if (i != 1)
			close(pipes[i][1]);
	/* A child that has not run yet starts first, which is no hop. */
	round_trips(pipes[1][1], pipes[0][0], 1);
	ns = round_trips(pipes[1][1], pipes[0][0], rounds);
	close(pipes[1][1]);
	for (int i = 1; i < size; i++)
		reap(children[i]);
	close(pipes[0][0]);
	return ns * hops / (rounds * size);
}

static uint64_t ctx_2(long hops)
{
	return ring(2, hops);
}

static uint64_t ctx_8(long hops)
{
	return ring(8, hops);
}

static uint64_t ctx_16(long hops)
{
	return ring(16, hops);
}

const struct measure processes[] = {
	{ "fork_exit", EACH, 1, 1 << 14, fork_exit },
	{ "fork_exec", EACH, 1, 1 << 14, fork_exec },
	{ "fork_sh", EACH, 1, 1 << 14, fork_sh },
	{ "pipe_rt", EACH, 1, 1 << 20, pipe_rt },
	{ "unix_rt", EACH, 1, 1 << 20, unix_rt },
	{ "inet_rt", EACH, 1, 1 << 20, inet_rt },
	{ "ctx_2", EACH, 1, 1 << 20, ctx_2 },
	{ "ctx_8", EACH, 1, 1 << 20, ctx_8 },
	{ "ctx_16", EACH, 1, 1 << 20, ctx_16 },
	{ 0 },
};
