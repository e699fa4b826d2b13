// Package volumes makes, shows and deletes the volumes of tenants, resolves them for sandboxes that mount them, and moves
// files in and out without a sandbox. It writes objects, for which a controller has the node make and remove directories;
// it opens those of volumes that exist. It has no lock.
package volumes

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	// PurposeTokens is what the key of volumes' tokens is derived for, from the server's secret.
	PurposeTokens = "barchan volume tokens"
	// makeTimeout bounds the wait for the files of a new volume, removeTimeout that for the end of one that no sandbox mounts.
	makeTimeout   = 20 * time.Second
	removeTimeout = 5 * time.Second
	tokenPrefix   = "bvt_"
	maxName       = 128
)

var validName = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// Cache reads volumes from memory.
type Cache interface {
	Volume(ctx context.Context, key types.NamespacedName) (*barchan.Volume, error)
	VolumeByID(ctx context.Context, id string) (*barchan.Volume, error)
	Volumes(ctx context.Context, namespace string) ([]barchan.Volume, error)
	// WaitVolume blocks until done returns true or an error. done gets nil once the volume is gone.
	WaitVolume(ctx context.Context, key types.NamespacedName, done func(*barchan.Volume) (bool, error)) (*barchan.Volume, error)
}

// Files has the files of volumes; the node's package volumes has them.
type Files interface {
	Tree(v volumetree.Ref) (*volumetree.Tree, error)
	// Take reserves bytes and files for an upload; negative ones return what was not used.
	Take(v volumetree.Ref, bytes, files int64) error
}

// Service has the volumes of all tenants. Its fields are required except Gate. It is safe for concurrent use.
type Service struct {
	Objects sandboxes.Objects
	Cache   Cache
	Files   Files
	// Quota refuses a volume beyond the sum of its namespace's objects; nil: none.
	Quota *quota.Quotas
	Log   *slog.Logger
	// TokenKey signs the tokens of volumes.
	TokenKey []byte
	// Gate refuses new volumes and uploads while the server is degraded. Nil: never.
	Gate *health.Gate
}

// Volume is one volume as its tenant may see it.
type Volume struct {
	ID, Name string
	// Capacity and Used are bytes; Used and Files are as they were last measured.
	Capacity, Used, Files int64
	// Sandboxes is the number of those that mount it.
	Sandboxes int32
	// Backend is the storage class, Source where the files are if that is not local.
	Backend, Source string
	ReadOnly        bool
	// Ready is whether sandboxes can mount it now; Reason and Message say why.
	Ready           bool
	Reason, Message string
	// Token gives access to the files.
	Token string
}

func (s *Service) view(v *barchan.Volume) Volume {
	out := Volume{
		ID: sandbox.VolumeIDOf(v.UID), Name: v.DisplayName(), Files: v.Status.Files, Sandboxes: v.Status.Sandboxes, Token: s.token(v.UID),
		Backend: cmp.Or(v.Spec.StorageClassName, barchan.StorageLocal), Source: v.Source(), ReadOnly: v.Spec.ReadOnly,
	}
	if c := meta.FindStatusCondition(v.Status.Conditions, barchan.ConditionReady); c != nil {
		out.Ready, out.Reason, out.Message = c.Status == metav1.ConditionTrue, c.Reason, c.Message
	}
	if q := cmp.Or(v.Status.Capacity, v.Spec.Capacity); q != nil {
		out.Capacity = q.Value()
	}
	if q := v.Status.Used; q != nil {
		out.Used = q.Value()
	}
	return out
}

// token is bound to the UID: it ends with the volume.
func (s *Service) token(uid types.UID) string {
	mac := hmac.New(sha256.New, s.TokenKey)
	mac.Write([]byte(uid)) // does not fail
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// New describes a volume that is to be made.
type New struct {
	Name string
	// Capacity in bytes; 0: the default.
	Capacity int64
	ReadOnly bool
	// S3 or NFS has the files; nil: they are the node's.
	S3  *Bucket
	NFS *barchan.NFSVolumeSource
}

// Create makes a volume, and waits until sandboxes can mount it.
func (s *Service) Create(ctx context.Context, namespace string, n New) (Volume, error) {
	v, key, err := n.object(namespace)
	if err != nil {
		return Volume{}, err
	}
	if err := s.Gate.Err(); err != nil {
		return Volume{}, err
	}
	if v, err = s.write(ctx, v, key, n.Name); err != nil {
		return Volume{}, err
	}
	if err = s.keepKey(ctx, v, key); err == nil {
		var made *barchan.Volume
		if made, err = s.awaitReady(ctx, v); err == nil {
			s.Log.InfoContext(ctx, "volume created", telemetry.Namespace, namespace, telemetry.Name, v.Name)
			return s.view(made), nil
		}
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), sandboxes.UndoTimeout)
	defer cancel()
	if err := s.delete(undo, v); err != nil {
		s.Log.ErrorContext(ctx, "volume not removed after a failed create", telemetry.Namespace, namespace, telemetry.Name, v.Name, telemetry.Error, err)
	}
	return Volume{}, err
}

// write makes the volume's object.
func (s *Service) write(ctx context.Context, v *barchan.Volume, key map[string][]byte, name string) (*barchan.Volume, error) {
	var err error
	if s.Quota != nil {
		err = s.Quota.CheckContents(ctx, v.Namespace)
	}
	if err == nil {
		err = s.Objects.Create(ctx, v)
	}
	switch {
	case apierrors.IsAlreadyExists(err):
		has, err := s.unfinished(ctx, v, key)
		if err == nil && has == nil {
			err = s.taken(ctx, client.ObjectKeyFromObject(v), name)
		}
		return has, err
	case err != nil:
		return nil, apistatus.From("create volume", err)
	}
	failpoint.Reach("volume/written")
	return v, nil
}

// object returns the volume's object, and the data of its Secret, if it needs one of its own.
func (n *New) object(namespace string) (v *barchan.Volume, key map[string][]byte, err error) {
	switch {
	case len(n.Name) > maxName || !validName.MatchString(n.Name):
		return nil, nil, apistatus.Refuse(errs.ErrInvalid, "name: %.80q must have from 1 to %d letters, digits, dashes and underscores", n.Name, maxName)
	case n.Capacity < 0:
		return nil, nil, apistatus.Refuse(errs.ErrInvalid, "capacity: must be positive")
	}
	v = &barchan.Volume{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: barchan.VolumeObjectName(n.Name), Labels: map[string]string{agents.LabelCreatedBy: sandboxes.CreatedBy},
	}, Spec: barchan.VolumeSpec{ReadOnly: n.ReadOnly}}
	if v.Name != n.Name {
		v.Spec.DisplayName = n.Name
	}
	if n.Capacity > 0 {
		v.Spec.Capacity = resource.NewQuantity(n.Capacity, resource.BinarySI)
	}
	if n.S3 != nil && n.NFS != nil {
		return nil, nil, apistatus.Refuse(errs.ErrInvalid, "nfs: not with s3")
	}
	if n.NFS != nil {
		v.Spec.NFS, v.Spec.StorageClassName = n.NFS, barchan.StorageNFS
	}
	if n.S3 != nil {
		if v.Spec.S3, key, err = n.S3.source(v.Name); err != nil {
			return nil, nil, err
		}
		v.Spec.StorageClassName = barchan.StorageS3
	}
	barchan.SetVolumeDefaults(v)
	return v, key, apistatus.InvalidFields(barchan.ValidateVolume(v, nil))
}

// taken says why a name is in use.
func (s *Service) taken(ctx context.Context, key types.NamespacedName, name string) error {
	has := &barchan.Volume{}
	if err := s.Objects.Get(ctx, key, has); err == nil && has.DeletionTimestamp != nil {
		why := "its files are being removed"
		if c := meta.FindStatusCondition(has.Status.Conditions, barchan.ConditionReady); c != nil && c.Reason == barchan.ReasonInUse {
			why = c.Message
		}
		return apistatus.Refuse(errs.ErrInvalid, "Volume with name '%s' is being deleted: %s", name, why)
	}
	return apistatus.Refuse(errs.ErrInvalid, "Volume with name '%s' already exists", name)
}

func (s *Service) awaitReady(ctx context.Context, made *barchan.Volume) (*barchan.Volume, error) {
	bounded, cancel := context.WithTimeout(ctx, makeTimeout)
	defer cancel()
	why := "try again"
	v, err := s.Cache.WaitVolume(bounded, client.ObjectKeyFromObject(made), func(v *barchan.Volume) (bool, error) {
		if v == nil || v.UID != made.UID {
			return false, apistatus.Refuse(errs.ErrConflict, "the volume was deleted while it was made")
		}
		c := meta.FindStatusCondition(v.Status.Conditions, barchan.ConditionReady)
		if c != nil && c.Reason == barchan.ReasonQuota {
			return false, apistatus.Refuse(errs.ErrExhausted, "%s", c.Message)
		}
		if v.Status.Phase == barchan.VolumeReady {
			return true, nil
		}
		if c != nil && c.Message != "" {
			why = c.Message
		}
		return false, unreachable(v, c)
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, errs.Public(err, "the volume was not made in time: "+why)
	}
	return v, err
}

// Get returns a tenant's volume.
func (s *Service) Get(ctx context.Context, namespace, id string) (Volume, error) {
	v, err := s.find(ctx, namespace, id)
	if err != nil {
		return Volume{}, err
	}
	return s.view(v), nil
}

func (s *Service) find(ctx context.Context, namespace, id string) (*barchan.Volume, error) {
	v, err := s.Cache.VolumeByID(ctx, id)
	if errors.Is(err, errs.ErrNotFound) || (err == nil && (v.Namespace != namespace || v.DeletionTimestamp != nil)) {
		return nil, notFound(id)
	}
	return v, err
}

func notFound(id string) error {
	return apistatus.Refuse(errs.ErrNotFound, "Volume %.80q not found", id)
}

// List returns a tenant's volumes, by name.
func (s *Service) List(ctx context.Context, namespace string) ([]Volume, error) {
	all, err := s.Cache.Volumes(ctx, namespace)
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	list := []Volume{}
	for i := range all {
		if all[i].DeletionTimestamp == nil {
			list = append(list, s.view(&all[i]))
		}
	}
	slices.SortFunc(list, func(a, b Volume) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Delete deletes a volume. One that a sandbox mounts is no longer shown; its files stay until none does.
func (s *Service) Delete(ctx context.Context, namespace, id string) error {
	v, err := s.find(ctx, namespace, id)
	if err != nil {
		return err
	}
	if err := s.delete(ctx, v); err != nil {
		return err
	}
	// Until the name is free, or will be later; in any case until reads no longer show the volume.
	bounded, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	_, err = s.Cache.WaitVolume(bounded, client.ObjectKeyFromObject(v), func(now *barchan.Volume) (bool, error) {
		if now == nil || now.UID != v.UID {
			return true, nil
		}
		c := meta.FindStatusCondition(now.Status.Conditions, barchan.ConditionReady)
		return now.DeletionTimestamp != nil && c != nil && c.Reason == barchan.ReasonInUse, nil
	})
	if err != nil && !errors.Is(err, errs.ErrTimeout) {
		return err
	}
	return nil
}

func (s *Service) delete(ctx context.Context, v *barchan.Volume) error {
	err := s.Objects.Delete(ctx, v, client.Preconditions{UID: &v.UID})
	if apierrors.IsNotFound(err) {
		return notFound(sandbox.VolumeIDOf(v.UID))
	}
	if err != nil {
		return apistatus.From("delete volume", err)
	}
	s.Log.InfoContext(ctx, "volume deleted", telemetry.Namespace, v.Namespace, telemetry.Name, v.Name)
	return nil
}

// Authorize returns the volume whose token a client has.
func (s *Service) Authorize(ctx context.Context, id, token string) (volumetree.Ref, error) {
	v, err := s.Cache.VolumeByID(ctx, id)
	if errors.Is(err, errs.ErrNotFound) || (err == nil && v.DeletionTimestamp != nil) {
		return volumetree.Ref{}, notFound(id)
	}
	if err != nil {
		return volumetree.Ref{}, err
	}
	if !hmac.Equal([]byte(token), []byte(s.token(v.UID))) {
		return volumetree.Ref{}, errs.Public(errs.ErrUnauthenticated, "the token is not that of this volume; send it in the header Authorization: Bearer")
	}
	return volumetree.Ref{Namespace: v.Namespace, Name: v.Name, UID: v.UID}, nil
}

// NameOf returns the name by which the API shows a volume, from its object's.
func (s *Service) NameOf(ctx context.Context, namespace, object string) string {
	if v, err := s.Cache.Volume(ctx, types.NamespacedName{Namespace: namespace, Name: object}); err == nil {
		return v.DisplayName()
	}
	return object
}
