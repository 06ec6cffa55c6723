/*
 * What an ordinary user can try with calls that anyone may make: `ordinary list` names the
 * cases, `ordinary CASE` tries one and prints `CASE held REASON` or `CASE broken REASON`.
 * A case may also be the end of the cell, which is for others to see.
 */
#include "ordinary.h"

static const struct {
	const char *name;
	int (*run)(void);
} cases[] = {
	{ "page_of_anothers_file", page_of_anothers_file },
	{ "page_read_ahead", page_read_ahead },
	{ "munmap_beside_read", munmap_beside_read },
	{ "odd_stacks", odd_stacks },
	{ "odd_registers", odd_registers },
	{ "no_access", no_access },
};
#define CASES (sizeof(cases) / sizeof(*cases))

char found[160];
volatile int is_over;

void race(void *(**threads)(void *), int count, int (*is_won)(void))
{
	struct timespec moment = { .tv_nsec = 20000000 };
	time_t end = time(NULL) + SECONDS;
	pthread_t ids[4];

	for (int i = 0; i < count; i++)
		pthread_create(&ids[i], NULL, threads[i], NULL);
	while (!is_won() && time(NULL) <= end)
		nanosleep(&moment, NULL);
	is_over = 1;
	for (int i = 0; i < count; i++)
		pthread_join(ids[i], NULL);
}

int main(int argc, char **argv)
{
	for (unsigned c = 0; c < CASES; c++) {
		if (argc == 2 && !strcmp(argv[1], "list"))
			printf("%s\n", cases[c].name);
		if (argc < 2 || strcmp(argv[1], cases[c].name))
			continue;
		int broken = cases[c].run();
		printf("%s %s %s\n", cases[c].name, broken ? "broken" : "held", found);
	}
	return 0;
}
