# Everything is done by a script under scripts/; a target says which.
.DEFAULT_GOAL := help
SHELL := bash
.PHONY: help up down deps runtimes build generate check-generated fmt lint check test test-short bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: deps runtimes build ## install what is missing, start the server, run a first program
	@scripts/up.sh

down: ## stop the server, sandboxes run on (ALL=1 removes everything)
	@scripts/down.sh $(if $(ALL),--all)

deps: ## install what is missing: distribution packages, Go
	@scripts/deps.sh

runtimes: ## build runsc, containerd and kubectl into the cache
	@scripts/tool.sh runsc containerd kubectl

build: ## build bin/barchan and bin/barchan-agent
	@scripts/build.sh

generate: ## make generated code anew
	@scripts/generate.sh

check-generated: ## fail if generated code is stale
	@scripts/generate.sh --check

fmt: ## format the code
	@scripts/fmt.sh

lint: ## run the linters
	@scripts/lint.sh

check: ## format, architecture, generated code, linters: what needs no running
	@scripts/fmt.sh --check
	@scripts/arch.sh
	@scripts/generate.sh --check
	@scripts/lint.sh

test: runtimes build ## run all tests (as root, for those of real sandboxes)
	@scripts/test.sh

test-short: runtimes build ## run the tests that take no time
	@scripts/test.sh -short

bench: runtimes build ## measure, with the floor beside each figure (ARGS="--only exec --json")
	@scripts/bench.sh $(ARGS)
