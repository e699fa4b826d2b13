package layers

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// maxPacked bounds the files of an archive that a sandbox packs.
const maxPacked = 500_000

// onlyFile returns the name of the regular file that an archive begins with; empty for a directory. A stage's archive of a
// single file has no other entry, and one of more begins with "./".
func (w *Work) onlyFile(archive string) (string, error) {
	files, err := w.r.Store.Files(w.Build.Namespace, archive)
	if err != nil {
		return "", fmt.Errorf("read files of the step: %w: %w", err, errs.ErrUnavailable)
	}
	defer func() { _ = files.Close() }()
	zip, err := gzip.NewReader(files)
	if err != nil {
		return "", buildlog.Refuse(w.Log.Step, "the files of the step are no gzipped tar: %v", err)
	}
	h, err := tar.NewReader(zip).Next()
	switch {
	case errors.Is(err, io.EOF): // no files
		return "", nil
	case err != nil:
		return "", buildlog.Refuse(w.Log.Step, "the files of the step are no gzipped tar: %v", err)
	case h.Typeflag != tar.TypeReg:
		return "", nil
	}
	return path.Clean(h.Name), nil
}

// pack keeps files of a sandbox as an archive. The agent's program reads them, and has its limits from here.
func (w *Work) pack(ctx context.Context, s *started, archive, what string, paths []string, from *barchan.StageFiles) error {
	agent, err := w.r.Agents.AgentAs(s.Sandbox, "0") // an image without a shell has no names either
	if err != nil {
		return err
	}
	request, err := json.Marshal(envd.PackRequest{
		Paths: paths, Exclude: from.Exclude, Parents: from.Parents, MaxBytes: w.r.Store.MaxFiles(), MaxFiles: maxPacked,
	})
	if err != nil {
		return err
	}
	read, write := io.Pipe()
	kept := make(chan error, 1)
	go func() { // ends with the pipe, which is closed below
		err := w.r.Store.PutFiles(ctx, w.Build.Namespace, archive, read)
		_ = read.CloseWithError(err)
		kept <- err
	}()
	trouble := &buildlog.LastLines{Log: w.Log.Output(builds.LevelWarn)}
	exit, err := agent.Exec(ctx, []string{envd.Program, "-" + envd.FlagPack, string(request)}, envd.ExecOptions{Stdout: write, Stderr: trouble, Dir: "/"})
	if err == nil && exit != 0 {
		err = buildlog.Refuse(w.Log.Step, "failed to %s: %s", what, trouble.End())
	} else if err != nil {
		err = w.agentError(ctx, s, what, err)
	}
	_ = write.CloseWithError(err) // nil: the end
	stored := <-kept
	switch {
	case errors.Is(stored, errs.ErrTooLarge):
		return buildlog.Refuse(w.Log.Step, "failed to %s: %s", what, errs.Text(stored))
	case err != nil:
		return err
	case stored != nil:
		return fmt.Errorf("%s: %w: %w", what, stored, errs.ErrUnavailable)
	}
	failpoint.Reach("templatebuild/packed")
	return nil
}
