package layers

import (
	"strings"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// History returns what made each layer of a build, the lowest first, as lines of a Dockerfile. Layers of the template that the
// build starts from are not among them.
func History(spec *barchan.TemplateBuildSpec) (lines []string) {
	if spec.From != nil && spec.From.Image != "" {
		lines = append(lines, "# the user \"user\"")
	}
	var open []string
	for i := range spec.Steps {
		step := &spec.Steps[i]
		open = append(open, textOf(step))
		if step.Type == barchan.StepRun || step.Type == barchan.StepCopy {
			lines, open = append(lines, strings.Join(open, "\n")), nil
		}
	}
	for i := range open {
		if !strings.HasPrefix(open[i], "ENV ") {
			return append(lines, strings.Join(open, "\n"))
		}
	}
	return lines
}

// StartArguments returns the program that runs a start command, as builds do.
func StartArguments(command string) []string { return shell(runScript, command) }

// shell returns the program that runs a script with arguments.
func shell(script string, args ...string) []string {
	return append([]string{"/bin/sh", "-c", script, "sh"}, args...)
}
