package builds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// uploadTime is how long an upload may begin after its URL was made.
const uploadTime = time.Hour

// maxTries bounds the writes of a build that its controller changes meanwhile.
const maxTries = 10

// UploadURL reports whether a tenant's archive is kept, and returns the end of the path by which it can be uploaded in the
// next hour. An archive belongs to the tenant, whatever its template.
func (s *Service) UploadURL(namespace, hash string) (present bool, path string, err error) {
	if err := s.Gate.Err(); err != nil {
		return false, "", err
	}
	if err := builds.CheckHash(hash); err != nil {
		return false, "", err
	}
	return s.Files.HasFiles(namespace, hash), signedurl.Upload(s.UploadKey, namespace, hash, time.Now().Add(uploadTime)), nil
}

// Upload keeps an archive of size bytes that is uploaded by such a path.
func (s *Service) Upload(ctx context.Context, path string, size int64, archive io.Reader) error {
	namespace, hash, ok := signedurl.VerifyUpload(s.UploadKey, path)
	if !ok {
		return apistatus.Refuse(errs.ErrForbidden, "the URL of the upload is not valid or has expired; ask for a new one")
	}
	if err := s.Gate.Err(); err != nil {
		return err
	}
	if most := s.Files.MaxFiles(); size > most {
		return apistatus.Refuse(errs.ErrTooLarge, "the archive is larger than %d bytes", most)
	}
	start := time.Now()
	err := s.Files.PutFiles(ctx, namespace, hash, archive)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return errs.Public(fmt.Errorf("%w: %w", errs.ErrUnavailable, err), "the server's disk is full; try again later")
	}
	if err != nil {
		return err
	}
	s.Log.InfoContext(ctx, "files of template builds uploaded", telemetry.Namespace, namespace, "hash", hash, "bytes", size, telemetry.Duration, time.Since(start))
	return nil
}

// Instructions are what a build does, as a client writes them.
type Instructions struct {
	// FromImage or FromTemplate is what it starts from.
	FromImage, FromTemplate string
	// Registry are credentials for FromImage, and for images of stages in its registry; nil: none.
	Registry *Registry
	Stages   []Stage
	Steps    []Step
	// Secrets are kept in memory alone.
	Secrets                    map[string][]byte
	StartCommand, ReadyCommand string
	// Force does all steps, even if their results are kept.
	Force bool
}

// Stage is a chain of steps whose files others take.
type Stage struct {
	Name                    string
	FromImage, FromTemplate string
	// Registry are credentials for FromImage; nil: those of the build, if its registry is the same.
	Registry *Registry
	Steps    []Step
}

// Step is one instruction.
type Step struct {
	// Type is RUN, COPY, WORKDIR, USER or ENV.
	Type      string
	Args      []string
	FilesHash string
	From      *barchan.StageFiles
	Mounts    []barchan.BuildMount
	Network   string
	Force     bool
}

// stepTypes has the types of steps by their names on the wire.
var stepTypes = map[string]barchan.BuildStepType{
	"RUN": barchan.StepRun, "COPY": barchan.StepCopy, "WORKDIR": barchan.StepWorkdir, "USER": barchan.StepUser, "ENV": barchan.StepEnv,
}

// Trigger starts a build. It does so once.
func (s *Service) Trigger(ctx context.Context, namespace, templateID, buildID string, what Instructions) error {
	b, err := s.find(ctx, namespace, templateID, buildID)
	if err != nil {
		return err
	}
	if err := s.Gate.Err(); err != nil {
		return err
	}
	spec, err := s.spec(ctx, namespace, &what)
	if err != nil {
		return err
	}
	for try := 1; ; try++ {
		if b.Spec.From != nil || b.Ended() {
			return apistatus.Refuse(errs.ErrConflict, "build '%s' was started before; request another one", buildID)
		}
		old := b.DeepCopy()
		b.Spec.From, b.Spec.Stages, b.Spec.Steps, b.Spec.Force = spec.From, spec.Stages, spec.Steps, what.Force
		b.Spec.StartCommand, b.Spec.ReadyCommand = what.StartCommand, what.ReadyCommand
		if err := check(b, old); err != nil {
			return err
		}
		if err := s.keepSecrets(ctx, b, &what); err != nil { // before its controller can ask for them
			return err
		}
		err = s.Objects.Update(ctx, b)
		if err == nil {
			break
		}
		if len(what.Secrets) > 0 {
			s.Files.DropSecrets(b.UID)
		}
		if !apierrors.IsConflict(err) || try == maxTries {
			return apistatus.From("start template build "+buildID, err)
		}
		if b, err = s.find(ctx, namespace, templateID, buildID); err != nil {
			return err
		}
	}
	s.Log.InfoContext(ctx, "template build started", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, b.Spec.TemplateName)
	return nil
}

// keepSecrets keeps those of the build's steps and of its registry.
func (s *Service) keepSecrets(ctx context.Context, b *barchan.TemplateBuild, what *Instructions) error {
	if err := s.Files.SetSecrets(b.UID, what.Secrets); err != nil {
		return err
	}
	err := s.withCredentials(ctx, b, what)
	if err != nil && len(what.Secrets) > 0 {
		s.Files.DropSecrets(b.UID)
	}
	return err
}

// spec translates what a build does, and refuses secrets that cannot be kept.
func (s *Service) spec(ctx context.Context, namespace string, what *Instructions) (spec barchan.TemplateBuildSpec, err error) {
	if spec.From, err = s.source(ctx, namespace, "", what.FromImage, what.FromTemplate); err != nil {
		return spec, err
	}
	if spec.Stages, err = s.stages(ctx, namespace, what.Stages); err != nil {
		return spec, err
	}
	if spec.Steps, err = s.steps(namespace, "", what.Steps); err != nil {
		return spec, err
	}
	return spec, builds.CheckSecrets(what.Secrets)
}

// source returns what a build or a stage starts from. at begins the names of fields in errors.
func (s *Service) source(ctx context.Context, namespace, at, image, template string) (*barchan.BuildSource, error) {
	switch {
	case (image == "") == (template == ""):
		return nil, apistatus.Refuse(errs.ErrInvalid, "%sfromImage: name either an image, or a template in fromTemplate", at)
	case image != "":
		return &barchan.BuildSource{Image: image}, nil
	}
	t, err := s.Templates.Resolve(ctx, namespace, template)
	if errors.Is(err, errs.ErrNotFound) {
		t, err = s.Templates.ResolveUncached(ctx, namespace, template)
	}
	if errors.Is(err, errs.ErrNotFound) {
		return nil, apistatus.Refuse(errs.ErrInvalid, "%sfromTemplate: template '%.80s' not found", at, template)
	}
	if err != nil {
		return nil, err
	}
	return &barchan.BuildSource{TemplateName: t.Name}, nil
}

// steps translates a build's steps, and refuses a copy of files that the server lacks.
func (s *Service) steps(namespace, at string, wire []Step) (steps []barchan.BuildStep, err error) {
	for i, w := range wire {
		kind, known := stepTypes[strings.ToUpper(w.Type)]
		if !known {
			return nil, apistatus.Refuse(errs.ErrInvalid, "%ssteps[%d].type: %.80q is none of RUN, COPY, WORKDIR, USER and ENV", at, i, w.Type)
		}
		step := barchan.BuildStep{
			Type: kind, Args: w.Args, FilesHash: w.FilesHash, From: w.From, Mounts: w.Mounts, Network: barchan.BuildNetwork(w.Network), Force: w.Force,
		}
		if kind == barchan.StepCopy && s.lacks(namespace, w.FilesHash) {
			return nil, apistatus.Refuse(errs.ErrInvalid, "%ssteps[%d].filesHash: the files of step %d (COPY %.80s) are not on the server; upload them first", at, i, i+1, strings.TrimRight(strings.Join(w.Args, " "), " "))
		}
		for k := range w.Mounts {
			if m := &w.Mounts[k]; m.Type == barchan.MountBind && s.lacks(namespace, m.FilesHash) {
				return nil, apistatus.Refuse(errs.ErrInvalid, "%ssteps[%d].mounts[%d].filesHash: its files are not on the server; upload them first", at, i, k)
			}
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// lacks reports whether the store has no archive of a hash that is one.
func (s *Service) lacks(namespace, hash string) bool {
	return builds.CheckHash(hash) == nil && !s.Files.HasFiles(namespace, hash)
}

func (s *Service) stages(ctx context.Context, namespace string, wire []Stage) (stages []barchan.BuildStage, err error) {
	for i, w := range wire {
		at := fmt.Sprintf("stages[%d].", i)
		from, err := s.source(ctx, namespace, at, w.FromImage, w.FromTemplate)
		if err != nil {
			return nil, err
		}
		steps, err := s.steps(namespace, at, w.Steps)
		if err != nil {
			return nil, err
		}
		stages = append(stages, barchan.BuildStage{Name: w.Name, From: *from, Steps: steps})
	}
	return stages, nil
}

// check validates a build as the API server does, with the field names of the wire.
func check(b, old *barchan.TemplateBuild) error {
	list := barchan.ValidateTemplateBuild(b, old)
	for _, e := range list {
		e.Field = strings.TrimPrefix(e.Field, "spec.")
	}
	return apistatus.InvalidFields(list)
}
