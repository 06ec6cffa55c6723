/*
 * What a hostile program can try against the guest kernel that is in its address
 * space, behind protection keys. `keys` tries everything, each in a child of its
 * own, and prints `CASE held` or `CASE broken`; a child that dies has not broken
 * anything. It ends with the number of cases that are broken; `keys read_memory`
 * tries that alone.
 *
 * execute_written is no attack: code that is written at run time has to work.
 */
#include "keys.h"

#define SECONDS_MAX 60

static const struct {
	const char *name;
	int (*run)(void);
	/* A death is no success either. */
	int must_live;
} cases[] = {
	{ "read_memory", read_memory, 1 },
	{ "write_kernel", write_kernel, 1 },
	{ "jump_pkru", jump_pkru, 1 },
	{ "jump_pkru_32", jump_pkru_32, 1 },
	{ "jump_restore", jump_restore, 1 },
	{ "jump_call", jump_call, 1 },
	{ "forge_signal", forge_signal, 1 },
	{ "forge_state", forge_state, 1 },
	{ "own_code", own_code, 1 },
	{ "own_code_across", own_code_across, 1 },
	{ "own_code_shared", own_code_shared, 1 },
	{ "own_code_later", own_code_later, 1 },
	{ "own_gs", own_gs, 1 },
	{ "clear_gs", clear_gs, 1 },
	{ "bad_flags", bad_flags, 1 },
	{ "bad_stack", bad_stack, 1 },
	{ "race", race, 1 },
	{ "execute_written", execute_written, 1 },
};

static int try(int (*run)(void), int must_live)
{
	int status;
	pid_t child = fork();

	if (child == 0) {
		alarm(SECONDS_MAX);
		_exit(run());
	}
	waitpid(child, &status, 0);
	if (!WIFEXITED(status))
		printf("(signal %d) ", WTERMSIG(status));
	return WIFEXITED(status) ? WEXITSTATUS(status) : must_live;
}

int main(int argc, char **argv)
{
	int broken = 0;

	setbuf(stdout, NULL);
	catch_faults();
	/* This one needs nothing of the rest, and shows what there is without keys. */
	if (argc > 1 && !strcmp(argv[1], "read_memory"))
		return read_memory();
	explore();
	printf("%d calls, %d writers of keys, %d restorers, %d pages to write to\n", calls.count,
	       pkru_writers.count, restorers.count, writable_count);
	/* An attack that has nothing to attack shows nothing. */
	if (!calls.count || pkru_writers.count != 4 || restorers.count != 1 || !handler ||
	    !writable_count) {
		printf("the guest kernel was not found\n");
		return 99;
	}
	for (unsigned c = 0; c < sizeof(cases) / sizeof(*cases); c++) {
		int is_broken = try(cases[c].run, cases[c].must_live) != 0;

		printf("%s %s\n", cases[c].name, is_broken ? "broken" : "held");
		broken += is_broken;
	}
	return broken;
}
