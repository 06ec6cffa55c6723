# Everything a newcomer needs: `make demo`, then `make test`. Each target does what it depends on.
#
# Variables (environment or command line):
#   EXOCELL_ROOT            state of the program: kernels, images, cells (default: /var/lib/exocell as root)
#   EXOCELL_CACHE           the base image's tree (default: ~/.cache/exocell)
#   EXOCELL_KERNEL_TARBALL  a source tarball for the guest kernel, else it is fetched
#   CARGO_TARGET_DIR        build outputs (default: target)
#
# What `make test` tells the tests (a test that needs one fails and says so where it is not set):
#   EXOCELL_INIT            the guest's init, a static executable
#   EXOCELL_TEST_BIN        the `exocell` executable
#   EXOCELL_TEST_KERNEL     the guest kernel
#   EXOCELL_TEST_BASE       the base image's root directory, as `exocell image import` takes it
#   EXOCELL_TEST_HOST       a kernel for the emulator; empty where there is none
#   EXOCELL_TEST_EMULATOR   an emulator of virtual machines; empty where there is none
#   EXOCELL_TEST_KVM_KERNEL the guest kernel for those; empty where it was not built (make kvm-kernel)
#   EXOCELL_TEST_PLUGINS    a folder with docker's plugins compose and buildx; empty where there is none
#   EXOCELL_TEST_CRICTL     the client of the Container Runtime Interface; empty where there is none

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.ONESHELL:

export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
export EXOCELL_CACHE := $(or $(EXOCELL_CACHE),$(HOME)/.cache/exocell)

# The init must be static: a cell's image may hold no libc, or another one. And small, with
# all that it uses: it lies in every cell's memory, and once more while the cell boots.
static_target := x86_64-unknown-linux-gnu
static_cargo := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"
static_cargo += CARGO_PROFILE_RELEASE_OPT_LEVEL=z CARGO_PROFILE_RELEASE_LTO=fat
static_cargo += CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1 CARGO_PROFILE_RELEASE_DEBUG=false cargo
# So must the command be in a guest that starts isolates. What it is linked from is the same.
guest_command := cargo rustc --release --locked -p exocell-cli --bin exocell --
guest_command += -C target-feature=+crt-static -C strip=symbols
release := $(CARGO_TARGET_DIR)/release
exocell := $(release)/exocell
init := $(CARGO_TARGET_DIR)/$(static_target)/release/exocell-init
base_tree := $(CARGO_TARGET_DIR)/base-tree

.PHONY: build setup kernel kvm-kernel base-image demo dist test fuzz bench stress pager audit lint deny book clean

build: setup
	$(static_cargo) build --release --locked -p exocell-init --target $(static_target)
	$(guest_command)
	install -p -m 755 $(exocell) $(release)/exocell-static
	cargo build --release --locked -p exocell-cli
	install -m 755 $(init) $(release)/exocell-init

setup:
	scripts/setup

kernel: build
	$(exocell) kernel build

# For cells on the platform kvm, which tests run in an emulator.
kvm-kernel: build
	$(exocell) kernel build --platform kvm

base-image: build
	images/base/build.sh $(base_tree)
	$(exocell) image import $(base_tree)/ --tag exocell/base:latest

demo: build kernel base-image
	EXOCELL=$(exocell) scripts/demo

# A Debian package, a tarball and a Python wheel in $(DIST), with checksums and what is linked in.
dist: DIST ?= $(CARGO_TARGET_DIR)/dist
dist: build kernel
	scripts/dist $(DIST)

# The init's tests run with its own target, or its dynamic build would replace the static one.
test: build kernel base-image
	export EXOCELL_INIT=$(init) EXOCELL_TEST_BIN=$(exocell) EXOCELL_TEST_BASE=$$(realpath $(base_tree))
	export EXOCELL_TEST_KERNEL=$$($(exocell) kernel status --json | sed -n 's/.*"path": *"\([^"]*\)".*/\1/p')
	export EXOCELL_TEST_HOST=$$(scripts/emulated-host) EXOCELL_TEST_PLUGINS=$$(scripts/docker-plugins)
	export EXOCELL_TEST_CRICTL=$$(scripts/crictl) EXOCELL_TEST_EMULATOR=$$(scripts/emulator)
	export EXOCELL_TEST_KVM_KERNEL=$$($(exocell) kernel status --platform kvm | sed -n 's/^present: //p')
	$(static_cargo) test --release --locked -p exocell-init --target $(static_target)
	scripts/tests --release --locked --workspace --exclude exocell-init --no-fail-fast

# Coverage for libFuzzer without a nightly compiler: what cargo-fuzz passes, but for the sanitizer.
fuzz_flags := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
fuzz_flags += -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
fuzz_flags += -Cllvm-args=-sanitizer-coverage-pc-table
fuzz_flags += -Cllvm-args=-sanitizer-coverage-trace-compares
fuzz_flags += -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks
fuzz_cargo := RUSTFLAGS="$(fuzz_flags)" cargo build --release --locked -p exocell-fuzz --bin fuzz
fuzz_cargo += --features libfuzzer --target $(static_target) --target-dir $(CARGO_TARGET_DIR)/fuzz
fuzz_bin := $(CARGO_TARGET_DIR)/fuzz/$(static_target)/release
fuzz_corpus := $(EXOCELL_CACHE)/fuzz

# SECONDS for each target; TARGET for one alone. What is found grows in the cache, and what
# crashes lies there as TARGET-crash-*: a seed to add, and a bug to mend.
fuzz: SECONDS ?= 60
fuzz:
	scripts/setup --fuzz
	cargo build --release --locked -p exocell-fuzz --bin fuzz-seeds
	$(fuzz_cargo)
	cd $$(mkdir -p $(fuzz_corpus) && realpath $(fuzz_corpus))
	for target in $$($(release)/fuzz-seeds .); do
		if [[ -n "$(TARGET)" && $$target != "$(TARGET)" ]]; then continue; fi
		echo "fuzz: $$target for $(SECONDS) seconds"
		EXOCELL_FUZZ_TARGET=$$target $(fuzz_bin)/fuzz -max_total_time=$(SECONDS) -timeout=30 \
			-rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 -artifact_prefix=$$target- $$target 2> $$target.log ||
			{ tail -n 40 $$target.log; exit 1; }
		grep -E 'DONE|stat::(number_of_executed_units|average_exec|peak_rss)' $$target.log
	done

bench: build kernel base-image
	scripts/setup --bench
	$(exocell) kernel build --stock
	$(exocell) bench start
	$(exocell) bench density
	$(exocell) bench micro
	$(exocell) bench apps

# MINUTES for each number of vCPUs.
MINUTES ?= 10
stress: build kernel base-image
	scripts/setup --bench
	EXOCELL=$(exocell) scripts/stress $(MINUTES)
	EXOCELL=$(exocell) scripts/pager check $(MINUTES)
	EXOCELL=$(exocell) scripts/audit check $(MINUTES)

# Builds guest kernels: without the Pager, with it off, and with each of two rules of it broken.
pager: build kernel base-image
	EXOCELL=$(exocell) scripts/pager off
	EXOCELL=$(exocell) scripts/pager wrong

# Builds guest kernels that leave something mapped, which the audit must find.
audit: build kernel base-image
	EXOCELL=$(exocell) scripts/audit wrong

lint: setup
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets --locked -- -D warnings
	for script in $$(find scripts -type f ! -name "*.patch") images/base/build.sh packaging/install.sh .ci/run; do
		case $$(head -n 1 "$$script") in
			*python3) python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$$script" ;;
			*) bash -n "$$script" ;;
		esac
	done

# Licences, sources and bans only: the advisory database is not on a package registry.
deny:
	command -v cargo-deny > /dev/null || cargo install --locked cargo-deny
	cargo deny --locked check licenses bans sources

# The book as a site, in $(CARGO_TARGET_DIR)/book. Its links are checked by `make test`.
book:
	command -v mdbook > /dev/null || cargo install --locked mdbook
	mdbook build docs --dest-dir $(CARGO_TARGET_DIR)/book

clean:
	cargo clean
	rm -f $(base_tree)
