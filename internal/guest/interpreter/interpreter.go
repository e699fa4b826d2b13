// Package interpreter has the code interpreter of sandboxes: the files and Debian packages of its image, and how it is
// started. The program itself is Python, below root, and runs in a sandbox only.
package interpreter

import (
	"embed"
	"fmt"
	"io/fs"
)

const (
	// Image is the name of the image in commands.
	Image = "code-interpreter"
	// Template is the template that clients of E2B's code interpreter ask for.
	Template = "code-interpreter-v1"
	// Repository is the image's name without its tag.
	Repository = "barchan.local/code-interpreter"
	// Port is where the program serves its API.
	Port = 49999
)

//go:embed all:root
var root embed.FS

// Files returns the program's files as they are below the root of its image.
func Files() fs.FS {
	files, err := fs.Sub(root, "root")
	if err != nil {
		panic(err) // the name is valid
	}
	return files
}

// Packages returns the Debian packages that the image has beyond the base image's.
func Packages() []string {
	return []string{
		"python3-ipykernel", "python3-jupyter-client", "python3-tornado", "r-cran-irkernel",
		"python3-bs4", "python3-lxml", "python3-matplotlib", "python3-numpy", "python3-openpyxl", "python3-pandas",
		"python3-requests", "python3-scipy", "python3-seaborn", "python3-sklearn", "python3-sympy", "r-cran-ggplot2",
	}
}

// Command starts the program as the image's user.
func Command() []string {
	return []string{"setpriv", "--reuid=user", "--regid=user", "--init-groups", "--reset-env", "--", "python3", "-m", "barchan_interpreter.server"}
}

// ReadyCommand ends once the program answers, with its kernels running.
func ReadyCommand() []string {
	return []string{"sh", "-c", fmt.Sprintf("until curl -sf --max-time 5 http://127.0.0.1:%d/health; do sleep 0.2; done", Port)}
}
