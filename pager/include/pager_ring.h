/*
 * What a guest kernel's Pager and its host say to each other where the guest cannot
 * call the host's kernel: a ring in memory that both map, and a doorbell.
 *
 * The guest fills the entry at put modulo PAGER_RING_ENTRIES, adds one to put, and
 * rings; a batch needs one ring. The host answers entries in order: it writes answer,
 * then adds one to done. No more than PAGER_RING_ENTRIES may wait. All numbers are in
 * the machine's byte order, pages are of 4096 bytes.
 */
#ifndef PAGER_RING_H
#define PAGER_RING_H

#define PAGER_RING_ENTRIES	256

#define PAGER_RING_ASK		1	/* at most so many pages of credit; answer: those granted */
#define PAGER_RING_GIVE		2	/* takes so many back; answer: 0 */
#define PAGER_RING_BIND		4	/* backs the range, of credit; answer: its pages, or 0: refused */
#define PAGER_RING_UNBIND	5	/* takes the range back; answer: its pages, or 0: it is as it was */

/* The longest range of one entry. */
#define PAGER_RING_PAGES_MAX	32768

struct pager_ring_entry {
	unsigned long long kind;
	unsigned long long first;	/* page of the range; 0 for credit */
	unsigned long long pages;
	unsigned long long answer;	/* the host's */
};

struct pager_ring {
	unsigned int put;		/* the guest's */
	unsigned int unused_1[15];
	unsigned int done;		/* the host's */
	unsigned int unused_2[15];
	struct pager_ring_entry entries[PAGER_RING_ENTRIES];
};

#endif
