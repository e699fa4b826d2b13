// Package build has `barchan build`, which makes a template from a Dockerfile and a directory by the server's API. The
// Dockerfile's meaning is package dockerfile's.
package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/dockerfile"
)

// options are the flags and the argument.
type options struct {
	name, file, dir    string
	buildArgs, secrets []string
	target, template   string
	cpus               int
	memory             string
	noCache            bool
	registryAuth       string
	start, ready       string
	setStart, setReady bool
	request            template.Options
	arguments          map[string]string
	given              map[string][]byte // secrets
}

// Command returns `barchan build`.
func Command(a *app.App) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "build [DIR]",
		Short: "Make a template from a Dockerfile and a directory",
		Long: "Make a template from a Dockerfile and a directory, by default the current one, and print the template's ID. The server\n" +
			"runs the steps in sandboxes and keeps the result of each, so that the next build runs only those after a change.\n" +
			"CMD and ENTRYPOINT run in every sandbox of the template, HEALTHCHECK decides when it is ready. Without USER or WORKDIR,\n" +
			"sandboxes have user \"user\" and /home/user. A secret is seen by the RUN --mount=type=secret that asks for it, and is kept\n" +
			"nowhere. Private images of FROM are pulled with the credentials that `docker login` has left, which no layer has. Ctrl-C\n" +
			"cancels the build.",
		Example: "  barchan build -t web .\n  barchan build -t web -f web.Dockerfile --build-arg VERSION=2 --cpus 2 --memory 1Gi src\n" +
			"  barchan run --template $(barchan build -t web .) -- ps",
	}
	f := cmd.Flags()
	f.StringVarP(&o.name, "tag", "t", "", "`NAME[:TAG]` of the template to make or replace (required)")
	f.StringVarP(&o.file, "file", "f", "", "the Dockerfile, or - (default DIR/Dockerfile)")
	f.StringArrayVar(&o.buildArgs, "build-arg", nil, "`NAME=VALUE` of an ARG, or the NAME of a variable of the environment")
	f.StringArrayVar(&o.secrets, "secret", nil, "`id=ID,src=FILE` or id=ID,env=NAME of a secret for RUN --mount=type=secret")
	f.StringVar(&o.registryAuth, "registry-auth", "", "`DIR` of Docker's config.json, with credentials for FROM, or none (default ~/.docker)")
	f.StringVar(&o.target, "target", "", "last stage of the Dockerfile to build, by name or number (default the last one)")
	f.StringVar(&o.template, "from-template", "", "template to start from in the place of the image of FROM")
	f.IntVar(&o.cpus, "cpus", 0, "CPUs of the template's sandboxes (default FROM's, or the server's)")
	f.StringVar(&o.memory, "memory", "", "memory of the template's sandboxes, such as 512Mi (default FROM's, or the server's)")
	f.BoolVar(&o.noCache, "no-cache", false, "run all steps, also those whose result is kept")
	f.StringVar(&o.start, "start-command", "", "command for a shell that runs in every sandbox, in the place of ENTRYPOINT and CMD")
	f.StringVar(&o.ready, "ready-command", "", "command for a shell that succeeds once a sandbox is ready, in the place of HEALTHCHECK")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o.dir = "."
		if len(args) == 1 {
			o.dir = args[0]
		}
		o.setStart, o.setReady = f.Changed("start-command"), f.Changed("ready-command")
		if err := o.check(a); err != nil {
			return app.Usage(cmd, err)
		}
		return run(cmd.Context(), a, &o)
	}
	return cmd
}

// check reads the values of flags.
func (o *options) check(a *app.App) error {
	if o.name == "" {
		return errors.New("-t is missing: the name of the template")
	}
	if o.cpus < 0 {
		return fmt.Errorf("--cpus: %d is not a number of CPUs", o.cpus)
	}
	o.request = template.Options{Name: o.name, CPUCount: o.cpus}
	if o.memory != "" {
		q, err := resource.ParseQuantity(o.memory)
		if err != nil || q.Value() < 1<<20 {
			return fmt.Errorf("--memory: %q is not a size of at least 1Mi, such as 512Mi", o.memory)
		}
		o.request.MemoryMB = (q.Value() + 1<<20 - 1) >> 20
	}
	o.arguments = map[string]string{}
	for _, text := range o.buildArgs {
		name, value, given := strings.Cut(text, "=")
		if name == "" {
			return fmt.Errorf("--build-arg: %q is not NAME=VALUE", text)
		}
		if !given {
			if value, given = a.LookupEnv(name); !given {
				continue
			}
		}
		o.arguments[name] = value
	}
	o.given = map[string][]byte{}
	for _, text := range o.secrets {
		if err := o.readSecret(a, text); err != nil {
			return fmt.Errorf("--secret: %w", err)
		}
	}
	return nil
}

// readSecret reads a secret, whose content no error has.
func (o *options) readSecret(a *app.App, text string) (err error) {
	var id, file, variable string
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		switch name {
		case "id":
			id = value
		case "src", "source":
			file = value
		case "env":
			variable = value
		case "type":
		default:
			return fmt.Errorf("%q is none of id, src and env", name)
		}
	}
	switch _, twice := o.given[id]; {
	case id == "" || (file != "" && variable != ""):
		return fmt.Errorf("%q is not id=ID,src=FILE or id=ID,env=NAME", text)
	case twice:
		return fmt.Errorf("id %q is there twice", id)
	case file != "":
		o.given[id], err = os.ReadFile(file)
		return err
	case variable == "":
		variable = id
	}
	value, has := a.LookupEnv(variable)
	if !has {
		return fmt.Errorf("id %q: the environment has no variable %s", id, variable)
	}
	o.given[id] = []byte(value)
	return nil
}

// plan reads the Dockerfile and the directory.
func (o *options) plan(ctx context.Context, a *app.App, root *os.Root) (*dockerfile.Plan, error) {
	if o.file == "" {
		o.file = filepath.Join(o.dir, "Dockerfile")
	}
	in, err := a.Open(ctx, o.file)
	if err != nil {
		return nil, fmt.Errorf("read the Dockerfile; -f names another: %w", err)
	}
	defer func() { _ = in.Close() }()
	content, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.file, err)
	}
	if o.file == "-" {
		o.file = "Dockerfile"
	}
	ignore, err := os.ReadFile(o.file + ".dockerignore")
	if errors.Is(err, fs.ErrNotExist) {
		ignore, err = os.ReadFile(filepath.Join(o.dir, ".dockerignore"))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	p, err := dockerfile.Parse(content, dockerfile.Options{
		Name: o.file, BuildArgs: o.arguments, Target: o.target, FromTemplate: o.template, Context: root, Ignore: ignore,
		Secrets: slices.Collect(maps.Keys(o.given)),
	})
	if err != nil {
		return nil, err
	}
	if o.setStart {
		p.StartCommand = o.start
	}
	if o.setReady {
		p.ReadyCommand = o.ready
	}
	return p, nil
}

// run builds the template.
func run(ctx context.Context, a *app.App, o *options) error {
	root, err := os.OpenRoot(o.dir)
	if err != nil {
		return fmt.Errorf("open the directory to build: %w", err)
	}
	defer func() { _ = root.Close() }()
	p, err := o.plan(ctx, a, root)
	if err != nil {
		return err
	}
	for _, note := range p.Notes {
		fmt.Fprintln(a.Stderr, "note: "+app.Message(errors.New(note)))
	}
	s, err := start(p, o.noCache, o.given)
	if err == nil {
		err = authenticate(a, o.registryAuth, &s)
	}
	if err != nil {
		return err
	}
	t, err := a.Server(ctx)
	if err != nil {
		return err
	}
	b, err := template.Request(ctx, t.REST, o.request)
	if err != nil {
		return err
	}
	w := &work{a: a, t: t, name: o.name, file: o.file, plan: p, build: b, cached: map[string]bool{}}
	err = w.run(ctx, s)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		w.cancel(ctx)
	}
	return err
}
