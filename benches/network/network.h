/* What the two ends of the measured connections share. */
#ifndef NETWORK_H
#define NETWORK_H

#include <stdint.h>
#include <stddef.h>

/* The first byte of a connection: what the peer is to do with it. */
enum job {
	DISCARD = 'd',	/* read all; answer one byte after the end */
	SOURCE = 's',	/* write until the other end goes */
	ECHO = 'e',	/* give each byte back */
};

/* What one write or read moves at most. */
#define BLOCK (256UL << 10)

/* `value` of a call that gives -1 on failure. */
long must(long value, const char *what);
/* Serves on `address`; prints the port, ends with standard input. */
int peer(const char *address);

#endif
