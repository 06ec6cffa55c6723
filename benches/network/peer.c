/* The other end: a server on the host, one thread a connection. */
#define _GNU_SOURCE
#include "network.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WAITING_MAX 512

static char zeros[BLOCK];

static void serve(int fd)
{
	char *block = malloc(BLOCK), job = 0;
	ssize_t got;

	if (!block || read(fd, &job, 1) != 1)
		job = 0;
	switch (job) {
	case DISCARD:
		while ((got = read(fd, block, BLOCK)) > 0)
			;
		if (got == 0 && write(fd, "k", 1) != 1)
			perror("peer: no answer");
		break;
	case SOURCE:
		while (write(fd, zeros, BLOCK) > 0)
			;
		break;
	case ECHO:
		while ((got = read(fd, block, BLOCK)) > 0 && write(fd, block, got) == got)
			;
		break;
	}
	free(block);
	close(fd);
}

static void *connection(void *fd)
{
	serve((int)(intptr_t)fd);
	return NULL;
}

static void *listens(void *listener)
{
	pthread_attr_t detached;

	pthread_attr_init(&detached);
	pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
	for (;;) {
		int yes = 1, fd = accept4((int)(intptr_t)listener, NULL, NULL, SOCK_CLOEXEC);
		pthread_t id;

		if (fd < 0)
			continue;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
		if (pthread_create(&id, &detached, connection, (void *)(intptr_t)fd))
			close(fd);
	}
	return NULL;
}

int peer(const char *address)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t length = sizeof(at);
	int fd = must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
	pthread_t id;
	char byte;

	/* Clients leave while they are written to. */
	signal(SIGPIPE, SIG_IGN);
	if (inet_pton(AF_INET, address, &at.sin_addr) != 1)
		return 2;
	must(bind(fd, (struct sockaddr *)&at, length), address);
	must(listen(fd, WAITING_MAX), "listen");
	must(getsockname(fd, (struct sockaddr *)&at, &length), "getsockname");
	if (pthread_create(&id, NULL, listens, (void *)(intptr_t)fd))
		return 1;
	printf("%d\n", ntohs(at.sin_port));
	fflush(stdout);
	while (read(0, &byte, 1) > 0)
		;
	return 0;
}
