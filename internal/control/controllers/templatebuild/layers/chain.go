package layers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
)

// chain is a list of layers with what they lie on: that of the template, or of a stage.
type chain struct {
	stage string // its name; empty: the template's own
	base  *Base
	// layers are all, and last is what they set.
	layers []layer
	last   settings
	// checkpoint has the files so far; empty: those of the image.
	checkpoint string
	settings   settings
	complete   bool
}

// key identifies the files of a complete chain.
func (c *chain) key() string {
	if n := len(c.layers); n > 0 {
		return c.layers[n-1].key
	}
	return c.base.key
}

// step returns what a step is called in the log and the status. number may be "base" too.
func (c *chain) step(number string) string {
	if c.stage == "" {
		return number
	}
	return c.stage + "/" + number
}

// started says what a chain starts from.
func (c *chain) started(from string) string {
	if c.stage != "" {
		return fmt.Sprintf("stage %s from %s", c.stage, from)
	}
	return "from " + from
}

// newChain groups steps into layers.
func (w *Work) newChain(ctx context.Context, stage string, from *barchan.BuildSource, steps []barchan.BuildStep) (*chain, error) {
	c := &chain{stage: stage}
	var err error
	w.chain, w.Log.Step = c, c.step(barchan.BuildStepBase)
	if c.base, err = w.call.FindBase(ctx, from); err != nil {
		return nil, ofStage(c, err)
	}
	if stage != "" && len(steps) == 0 { // whose files are only copied, so that it needs no shell
		c.base.prepared = true
	}
	keys := map[string]string{}
	for name, s := range w.stages {
		keys[name] = s.key()
	}
	c.layers, c.last, err = layersOf(c.base, steps, w.Build.Spec.Force, string(w.Build.UID), keys)
	c.checkpoint, c.settings = c.base.checkpoint, c.base.settings
	return c, ofStage(c, err)
}

// ofStage names the stage in a refusal of what it starts from, or of all its steps.
func ofStage(c *chain, err error) error {
	if f, is := errors.AsType[*buildlog.Failure](err); is && c.stage != "" && f.Step == barchan.BuildStepBase {
		return buildlog.Refuse(c.step(barchan.BuildStepBase), "stage '%s': %s", c.stage, strings.TrimPrefix(f.Message, "spec."))
	}
	return err
}

// chains makes those of all stages and the template's own, and takes the stages of which all layers are kept.
func (w *Work) chains(ctx context.Context) (*chain, error) {
	spec := &w.Build.Spec
	w.stages = map[string]*chain{}
	for i := range spec.Stages {
		s := &spec.Stages[i]
		c, err := w.newChain(ctx, s.Name, &s.From, s.Steps)
		if err != nil {
			return nil, err
		}
		w.stages[s.Name] = c
		top, err := w.topmost(ctx, c.layers)
		if err != nil {
			return nil, err
		}
		if top == len(c.layers) {
			w.take(c, top)
			c.complete = true
		}
	}
	return w.newChain(ctx, "", spec.From, spec.Steps)
}

// take goes on after layers that are kept.
func (w *Work) take(c *chain, top int) {
	if top > 0 {
		c.checkpoint, c.settings = c.layers[top-1].checkpoint(), c.layers[top-1].after
		w.cached(c, c.layers[:top])
	}
}

// finishChain runs the layers that are missing.
func (w *Work) finishChain(ctx context.Context, c *chain) error {
	if c.complete {
		return nil
	}
	before, step := w.chain, w.Log.Step
	defer func() { w.chain, w.Log.Step = before, step }()
	w.chain, w.Log.Step = c, c.step(barchan.BuildStepBase)
	top, err := w.topmost(ctx, c.layers)
	if err != nil {
		return err
	}
	w.take(c, top)
	for i := top; i < len(c.layers); i++ {
		if err := w.runLayer(ctx, &c.layers[i]); err != nil {
			before, step = w.chain, w.Log.Step // where it failed
			return err
		}
	}
	c.settings, c.complete = c.last, true
	return nil
}

// archiveOf returns the name of the archive with files of a stage.
func archiveOf(c *chain, from *barchan.StageFiles, paths []string) string {
	return longHashOf(form, "stage", c.key(), paths, from.Exclude, from.Parents)
}

// stageFiles makes the archive with files of a stage, unless it is kept, and returns its name. The stage's own sandbox packs it:
// a hostile tree meets the limits of that.
func (w *Work) stageFiles(ctx context.Context, from *barchan.StageFiles, paths []string) (string, error) {
	c := w.stages[from.Stage]
	if c == nil { // validated when the build was written
		return "", buildlog.Refuse(w.Log.Step, "there is no stage '%s' before this step", from.Stage)
	}
	name := archiveOf(c, from, paths)
	if w.r.Store.HasFiles(w.Build.Namespace, name) {
		return name, nil
	}
	if err := w.finishChain(ctx, c); err != nil {
		return "", err
	}
	before := w.chain
	w.chain = c
	defer func() { w.chain = before }()
	s, err := w.start(ctx, w.limited(), w.offline())
	if err != nil {
		return "", err
	}
	defer w.remove(ctx, s)
	return name, w.pack(ctx, s, name, fmt.Sprintf("copy from stage '%s'", c.stage), paths, from)
}

// stepNumber returns the name of a chain's step by its index.
func (w *Work) stepNumber(i int) string { return w.step(strconv.Itoa(i + 1)) }

// sourcesOf returns the paths of a Copy from a stage, as absolute ones.
func sourcesOf(step *barchan.BuildStep) []string {
	paths := []string{rooted(step.Args[0])}
	for _, p := range step.From.Paths {
		paths = append(paths, rooted(p))
	}
	return paths
}

// rooted returns a path of a stage, where relative ones begin at the root. It keeps "/./".
func rooted(p string) string {
	if p = cmp.Or(p, "/"); p[0] == '/' {
		return p
	}
	return "/" + p
}
