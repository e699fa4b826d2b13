# Everything is done by a script under scripts/; a target says which.
.DEFAULT_GOAL := help
SHELL := bash
.PHONY: help up down deps runtimes kubectl build images release generate check-generated fmt lint check test test-all test-short test-kube fuzz bench bench-kube canaries figures

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## install what is missing, start the server, run a first program
	@scripts/deps.sh up
	@$(MAKE) --no-print-directory -j2 runtimes build
	@scripts/up.sh

down: ## stop the server; sandboxes keep running (ALL=1 removes everything)
	@scripts/down.sh $(if $(ALL),--all)

deps: ## install what is missing to build, test and run
	@scripts/deps.sh

runtimes: ## build runsc, containerd and barchan-volumefs into the cache
	@scripts/tool.sh runsc containerd barchan-volumefs

kubectl: ## build kubectl into the cache
	@scripts/tool.sh kubectl

build: ## build bin/barchan and bin/barchan-agent
	@scripts/build.sh

generate: ## generate code again
	@scripts/generate.sh

check-generated: ## fail if generated code is stale
	@scripts/generate.sh --check

fmt: ## format the code
	@scripts/fmt.sh

lint: ## run the linters
	@scripts/lint.sh

check: ## check format, architecture, generated code, linters
	@scripts/fmt.sh --check
	@scripts/arch.sh
	@scripts/generate.sh --check
	@scripts/lint.sh

test: deps runtimes kubectl build ## run the tests, with a sample of crashes (PKG=./test/e2e RUN=TestPorts ARGS=-v)
	@scripts/test.sh $(ARGS)

test-all: deps runtimes kubectl build ## run all tests: also all crashes, the soak, partitions, kube-apiserver
	@scripts/test.sh --all $(ARGS)

test-kube: deps ## run the tests on a real Kubernetes, with kubelet, runc and gVisor
	@scripts/test.sh --kube $(ARGS)

test-short: runtimes kubectl build ## run the tests that take no time
	@scripts/test.sh -short $(ARGS)

fuzz: ## give each parser of external input a million generated inputs (ARGS='INPUTS PATTERN')
	@scripts/fuzz.sh $(ARGS)

images: ## build the programs of images for amd64 and arm64 into bin/images, for `barchan cluster --from`
	@scripts/build.sh images

release: runtimes ## make what users install: dist/*.tar.gz, dist/*.deb
	@scripts/build.sh release
	@scripts/release.sh

bench: runtimes build ## measure, with a baseline beside each result (ARGS="--only exec --json")
	@scripts/bench.sh $(ARGS)

canaries: runtimes kubectl build ## restore each canary N times, or for FOR at most, and print the rate of failures (N=2000 FOR=2h)
	@PKG=./test/e2e RUN=TestCanaryRestores scripts/test.sh -v -timeout=$(or $(FOR),2h) -args -canary-restores=$(or $(N),2000)

figures: runtimes build ## measure what docs/figures.md shows, and write it (ARGS='--quick --note "Other work was running."')
	@scripts/figures.sh $(ARGS)

bench-kube: deps ## measure claims on a real kube-apiserver with faked kubelets (ARGS="-rounds 3 -json -peer DIR", ARGS="-sandboxes 100,10000")
	@scripts/bench-kube.sh $(ARGS)
