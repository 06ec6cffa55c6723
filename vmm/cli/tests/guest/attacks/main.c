/*
 * What a hostile guest program can try against the stub, the host process that
 * runs its code: `attacks list` names the cases, `attacks CASE` tries one and
 * prints `CASE held REASON` or `CASE broken REASON`. `attacks CASE own` tries it with a
 * host call of its own instead, on the host: that the attack works at all.
 *
 * The stub's own pages are mapped where the guest's address space ends; they are
 * found by probing, not by a layout that another kernel may not have. A host call
 * shows by its effect: a page that appears where the guest mapped none.
 */
#include "attacks.h"

static const struct {
	const char *name;
	int (*run)(void);
} cases[] = {
	{ "jump_mmap_anonymous", jump_mmap_anonymous },
	{ "jump_mmap_memory", jump_mmap_memory },
	{ "jump_mremap", jump_mremap },
	{ "int80", int80 },
	{ "sysenter", sysenter_ },
	{ "far_jump_32", far_jump_32 },
	{ "vsyscall", vsyscall },
	{ "remap_stub", remap_stub },
	{ "write_stub_code", write_stub_code },
	{ "forge_data", forge_data },
	{ "forge_gate", forge_gate },
	{ "keep_cpu_mask", keep_cpu_mask },
	{ "keep_cpu_sigreturn", keep_cpu_sigreturn },
	{ "keep_cpu_sigprocmask", keep_cpu_sigprocmask },
	{ "keep_cpu_bad_stack", keep_cpu_bad_stack },
	{ "poison", poison },
	{ "outlive_exit", outlive_exit },
	{ "outlive_munmap", outlive_munmap },
};
#define CASES (sizeof(cases) / sizeof(*cases))

/* Where the cases must succeed: not in the stub, and not filtered. */
__attribute__((naked)) static void own_site(void)
{
	__asm__ volatile("syscall\n\tud2");
}

int main(int argc, char **argv)
{
	int own = argc == 3 && !strcmp(argv[2], "own");

	for (unsigned c = 0; c < CASES; c++) {
		if (argc == 2 && !strcmp(argv[1], "list"))
			printf("%s\n", cases[c].name);
		if (argc < 2 || strcmp(argv[1], cases[c].name))
			continue;
		if (own)
			sites[site_count++] = (unsigned long)own_site;
		else
			explore();
		/* An attack that has nothing to attack shows nothing. */
		if (site_count == 0)
			snprintf(found, sizeof(found), "the stub was not found");
		int broken = site_count == 0 || cases[c].run();
		printf("%s %s %s\n", cases[c].name, broken ? "broken" : "held", found);
	}
	return 0;
}
