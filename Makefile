# The verbs of build_and_run.sh for people who type make; options go in ARGS, e.g. make test ARGS="--cpu-only -- -k varlen"
.PHONY: all run build test bench clean help
all: run
run build test bench clean:
	@./build_and_run.sh $@ $(ARGS)
help:
	@./build_and_run.sh --help
