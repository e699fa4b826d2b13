package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/client/interpreter"
	"github.com/barchan-dev/barchan/client/template"
)

// testGoClient uses the public Go client as its examples do.
func testGoClient(t *testing.T, s *server) {
	ctx := t.Context()
	c, err := client.New(client.Config{URL: "http://" + s.http, Key: s.localKey()})
	if err != nil {
		t.Fatal(err)
	}
	data, err := c.CreateVolume(ctx, client.VolumeOptions{Name: "go-client"})
	if err != nil {
		t.Fatal(err)
	}
	x, err := c.Create(ctx, client.CreateOptions{
		Timeout: 10 * time.Minute, EnvVars: map[string]string{"GREETING": "hello"}, VolumeMounts: []client.VolumeMount{{Name: "go-client", Path: "/data"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(x.Kill(ctx), c.DeleteVolume(ctx, data.VolumeID)); err != nil {
			t.Error(err)
		}
	}()
	if err := errors.Join(x.Files.WriteString(ctx, "name.txt", "world"), c.VolumeWrite(ctx, data, "/v", 0, strings.NewReader(" of volumes"))); err != nil {
		t.Fatal(err)
	}
	const line = `echo "$GREETING $(cat name.txt)$(cat /data/v)"; exit 3`
	res, err := x.Commands.Run(ctx, line, client.CommandOptions{})
	if exit, ok := errors.AsType[*client.ExitError](err); !ok || exit.ExitCode != 3 || res.Stdout != "hello world of volumes\n" {
		t.Errorf("run: %+v, %v", res, err)
	}
	if res, err := x.As("root").Commands.Run(ctx, "id -u", client.CommandOptions{}); err != nil || res.Stdout != "0\n" {
		t.Errorf("as root: %+v, %v", res, err)
	}
	testGoLife(t, c, x)
	if _, err := c.Get(ctx, "inone000000000000000"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("no sandbox: %v", err)
	}
	var log []string
	built, err := template.Build(ctx, c, template.Options{Name: "go-client"}, template.Spec{
		FromTemplate: "base", Steps: []template.Step{{Type: template.StepRun, Args: []string{"echo made > /made", "root"}}},
	}, func(e template.LogEntry) { log = append(log, e.Message) })
	if has, existsErr := template.Exists(ctx, c, "go-client"); err != nil || existsErr != nil || !has || len(log) == 0 {
		t.Fatalf("build: %v, %v, %v, log %q", err, has, existsErr, log)
	}
	_, err = template.Build(ctx, c, template.Options{Name: "go-client"}, template.Spec{
		FromTemplate: "base", Steps: []template.Step{{Type: template.StepRun, Args: []string{"exit 7", "root"}}},
	}, nil)
	if failed, ok := errors.AsType[*template.Failure](err); !ok || failed.Reason == nil || failed.Reason.Step != "1" {
		t.Errorf("a step that fails: %v", err)
	}
	if tags, err := template.Tags(ctx, c, built.TemplateID); err != nil || len(tags) == 0 {
		t.Errorf("tags: %+v, %v", tags, err)
	}
	if err := c.DeleteTemplate(ctx, built.TemplateID); err != nil {
		t.Error(err)
	}
}

// testGoLife pauses, resumes, copies and forks a sandbox.
func testGoLife(t *testing.T, c *client.Client, x *client.Sandbox) {
	ctx := t.Context()
	if err := x.Pause(ctx, client.PauseOptions{}); err != nil {
		t.Fatal(err)
	}
	if running, err := x.IsRunning(ctx); running || err != nil {
		t.Errorf("a paused sandbox runs: %v, %v", running, err)
	}
	if err := x.Pause(ctx, client.PauseOptions{}); !errors.Is(err, client.ErrConflict) {
		t.Errorf("paused twice: %v", err)
	}
	if _, err := c.Connect(ctx, x.SandboxID, client.ConnectOptions{Timeout: 10 * time.Minute}); err != nil {
		t.Fatal(err)
	}
	if running, err := x.IsRunning(ctx); !running || err != nil {
		t.Errorf("a resumed sandbox: %v, %v", running, err)
	}
	if err := x.SetTimeout(ctx, time.Hour); err != nil {
		t.Error(err)
	}
	info, err := x.Info(ctx)
	if err != nil || info.State != client.StateRunning || time.Until(info.EndAt) < 50*time.Minute {
		t.Errorf("info: %+v, %v", info, err)
	}
	forks, err := x.Fork(ctx, client.ForkOptions{Count: 2, AllowSecrets: true})
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range forks {
		if f.Error != nil {
			t.Errorf("fork %d: %s", i, f.Error.Message)
			continue
		}
		res, err := f.Sandbox.Commands.Run(ctx, fmt.Sprintf("cat name.txt; echo %d", i), client.CommandOptions{})
		if err != nil || res.Stdout != fmt.Sprintf("world%d\n", i) {
			t.Errorf("fork %d: %+v, %v", i, res, err)
		}
		if err := f.Sandbox.Kill(ctx); err != nil {
			t.Error(err)
		}
	}
}

// testGoInterpreter runs code by the public Go client.
func testGoInterpreter(t *testing.T, s *server) {
	ctx := t.Context()
	c, err := client.New(client.Config{URL: "http://" + s.http, Key: s.localKey()})
	if err != nil {
		t.Fatal(err)
	}
	x, err := c.Create(ctx, client.CreateOptions{TemplateID: interpreter.Template})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = x.Kill(ctx) }()
	var printed string
	got, err := interpreter.Run(ctx, x, "import os\nprint('out')\nn = 41\nn + int(os.environ['ONE'])", interpreter.Options{
		Env: map[string]string{"ONE": "1"}, OnStdout: func(text string) { printed += text },
	})
	if err != nil || got.Text() != "42" || got.Stdout != "out\n" || printed != "out\n" || got.Error != nil {
		t.Errorf("%+v, %v; printed %q", got, err, printed)
	}
	if got, err = interpreter.Run(ctx, x, "1/0", interpreter.Options{}); err != nil || got.Error == nil || got.Error.Name != "ZeroDivisionError" || got.Error.Traceback == "" {
		t.Errorf("an error: %+v, %v", got, err)
	}
	plot := "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
	if got, err = interpreter.Run(ctx, x, plot, interpreter.Options{}); err != nil || len(got.Results) == 0 || !bytes.HasPrefix(got.Results[0].PNG, []byte("\x89PNG")) {
		t.Errorf("a plot: %+v, %v", got, err)
	}
	own, err := interpreter.NewContext(ctx, x, "", "/tmp")
	if err != nil {
		t.Fatal(err)
	}
	if got, err = interpreter.Run(ctx, x, "n", interpreter.Options{ContextID: own.ID}); err != nil || got.Error == nil || got.Error.Name != "NameError" {
		t.Errorf("another context: %+v, %v", got, err)
	}
	if err := errors.Join(interpreter.RestartContext(ctx, x, own.ID), interpreter.DeleteContext(ctx, x, own.ID)); err != nil {
		t.Error(err)
	}
	if err := interpreter.DeleteContext(ctx, x, own.ID); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a context that is gone: %v", err)
	}
	slow, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := interpreter.Run(slow, x, "import time\ntime.sleep(60)", interpreter.Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a context that ends: %v", err)
	}
}
