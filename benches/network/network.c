/*
 * The measuring program: `network list` names the measurements, `network serve
 * ADDRESS PORT` takes them from standard input, one `NAME SAMPLES` a line, and
 * answers `NAME VALUE...` or `NAME error REASON`; `network peer ADDRESS` is the
 * host's end. One static program runs in every subject.
 *
 * Each request runs in a child of its own: its connections end with it.
 */
#define _GNU_SOURCE
#include "network.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SAMPLE_NS 300000000UL
#define SAMPLES_MAX 64
#define REQUEST_SECONDS_MAX 60
#define FLOWS_MAX 8
/* Connections in a sample: the ports of a minute, in which they are not used again, are few. */
#define CONNECTIONS 256

/* What a request's child tells its parent. */
static struct answer {
	double values[SAMPLES_MAX];
	char error[128];
} *answer;

static struct sockaddr_in there;
static pthread_barrier_t barrier;

/* One of the connections of a sample. */
struct flow {
	pthread_t id;
	int fd;
	/* When the sample is over. */
	uint64_t until;
	long connections;
	uint64_t bytes;
};

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

static _Noreturn void fail(const char *what)
{
	const char *why = errno ? strerror(errno) : "";

	if (answer)
		snprintf(answer->error, sizeof(answer->error), "%s %s", what, why);
	else
		fprintf(stderr, "%s %s\n", what, why);
	_exit(1);
}

long must(long value, const char *what)
{
	if (value == -1)
		fail(what);
	return value;
}

static int connection(char job)
{
	int yes = 1, fd = must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");

	must(connect(fd, (struct sockaddr *)&there, sizeof(there)), "connect");
	must(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)), "setsockopt");
	must(write(fd, &job, 1), "write");
	return fd;
}

/* Bytes count when the peer says that it has read all of them. */
static void *sends(void *argument)
{
	struct flow *flow = argument;
	char *block = calloc(1, BLOCK), byte;

	pthread_barrier_wait(&barrier);
	while (now_ns() < flow->until)
		flow->bytes += must(write(flow->fd, block, BLOCK), "write");
	must(shutdown(flow->fd, SHUT_WR), "shutdown");
	errno = 0;
	if (read(flow->fd, &byte, 1) != 1)
		fail("the peer did not read all");
	free(block);
	return NULL;
}

static void *receives(void *argument)
{
	struct flow *flow = argument;
	char *block = calloc(1, BLOCK);

	pthread_barrier_wait(&barrier);
	while (now_ns() < flow->until)
		flow->bytes += must(read(flow->fd, block, BLOCK), "read");
	free(block);
	return NULL;
}

static void *connects(void *argument)
{
	struct flow *flow = argument;

	pthread_barrier_wait(&barrier);
	for (long i = 0; i < flow->connections; i++) {
		int fd = connection(ECHO);
		char byte = 0;

		must(write(fd, &byte, 1), "write");
		errno = 0;
		if (read(fd, &byte, 1) != 1)
			fail("no answer");
		close(fd);
	}
	return NULL;
}

/* Runs `flows` threads over as many connections; the nanoseconds they took. */
static uint64_t together(struct flow *flow, int flows, void *(*run)(void *), char job)
{
	uint64_t start;

	pthread_barrier_init(&barrier, NULL, flows + 1);
	for (int i = 0; i < flows; i++) {
		flow[i] = (struct flow){ .fd = -1, .connections = CONNECTIONS / flows };
		if (job)
			flow[i].fd = connection(job);
		if (pthread_create(&flow[i].id, NULL, run, &flow[i]))
			fail("pthread_create");
	}
	start = now_ns();
	for (int i = 0; i < flows; i++)
		flow[i].until = start + SAMPLE_NS;
	pthread_barrier_wait(&barrier);
	for (int i = 0; i < flows; i++)
		pthread_join(flow[i].id, NULL);
	start = now_ns() - start;
	for (int i = 0; i < flows; i++)
		if (flow[i].fd >= 0)
			close(flow[i].fd);
	pthread_barrier_destroy(&barrier);
	return start;
}

/* Megabytes a second. */
static double rate(int flows, void *(*run)(void *), char job)
{
	struct flow flow[FLOWS_MAX];
	uint64_t ns = together(flow, flows, run, job), bytes = 0;

	for (int i = 0; i < flows; i++)
		bytes += flow[i].bytes;
	return bytes * 1000.0 / ns;
}

/* Nanoseconds for each connection. */
static double each(int flows)
{
	struct flow flow[FLOWS_MAX];

	return (double)together(flow, flows, connects, 0) / (CONNECTIONS / flows * flows);
}

static double out(int flows)
{
	return rate(flows, sends, DISCARD);
}

static double in(int flows)
{
	return rate(flows, receives, SOURCE);
}

static double round_trip(int flows)
{
	int fd = connection(ECHO);
	uint64_t start = now_ns(), now = start;
	long trips = 0;
	char byte = 0;

	(void)flows;
	while (now - start < SAMPLE_NS) {
		must(write(fd, &byte, 1), "write");
		must(read(fd, &byte, 1), "read");
		trips++;
		now = now_ns();
	}
	close(fd);
	return (double)(now - start) / trips;
}

static const struct measure {
	const char *name, *unit;
	int flows;
	double (*sample)(int flows);
} measures[] = {
	{ "tcp_out_1", "MB/s", 1, out },
	{ "tcp_out_8", "MB/s", 8, out },
	{ "tcp_in_1", "MB/s", 1, in },
	{ "tcp_in_8", "MB/s", 8, in },
	{ "connection", "ns", 1, each },
	{ "connection_8", "ns", 8, each },
	{ "round_trip", "ns", 1, round_trip },
};
#define MEASURES (sizeof(measures) / sizeof(*measures))

static void measure(const struct measure *m, int samples)
{
	alarm(REQUEST_SECONDS_MAX);
	signal(SIGPIPE, SIG_IGN);
	for (int s = 0; s < samples; s++)
		answer->values[s] = m->sample(m->flows);
	_exit(0);
}

/* Runs one request in a child and prints its line. */
static void serve_one(const char *name, int samples)
{
	const struct measure *m = NULL;
	int status;

	for (size_t i = 0; i < MEASURES; i++)
		if (!strcmp(measures[i].name, name))
			m = &measures[i];
	if (!m || samples < 1 || samples > SAMPLES_MAX) {
		printf("%s error not a request\n", name);
		return;
	}
	answer->error[0] = 0;
	pid_t child = fork();
	if (child == 0)
		measure(m, samples);
	if (child < 0 || waitpid(child, &status, 0) < 0) {
		printf("%s error fork: %s\n", name, strerror(errno));
	} else if (WIFSIGNALED(status)) {
		printf("%s error killed by signal %d\n", name, WTERMSIG(status));
	} else if (status) {
		printf("%s error %s\n", name, answer->error);
	} else {
		printf("%s", name);
		for (int s = 0; s < samples; s++)
			printf(" %.3f", answer->values[s]);
		printf("\n");
	}
}

static int serve(const char *address, const char *port)
{
	char line[128], name[64];
	int samples;

	there.sin_family = AF_INET;
	there.sin_port = htons(atoi(port));
	if (inet_pton(AF_INET, address, &there.sin_addr) != 1)
		return 2;
	answer = mmap(NULL, sizeof(*answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		      -1, 0);
	if (answer == MAP_FAILED)
		return 1;
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%63s %d", name, &samples) != 2)
			continue;
		serve_one(name, samples);
		fflush(stdout);
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "list")) {
		for (size_t i = 0; i < MEASURES; i++)
			printf("%s %s 2\n", measures[i].name, measures[i].unit);
		return 0;
	}
	if (argc == 4 && !strcmp(argv[1], "serve"))
		return serve(argv[2], argv[3]);
	if (argc == 3 && !strcmp(argv[1], "peer"))
		return peer(argv[2]);
	fprintf(stderr, "usage: network list|serve ADDRESS PORT|peer ADDRESS\n");
	return 2;
}
