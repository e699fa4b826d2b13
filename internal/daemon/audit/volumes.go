package audit

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

const remedyVolume = "no object has it any more, such as after a restore of etcd; move the directory away, or delete it"

// volumes finds the directories of volumes that have no object.
func (a Server) volumes(ctx context.Context) (found []adminclient.Finding, err error) {
	dirs, err := a.Node.Volumes.List()
	if err != nil || len(dirs) == 0 {
		return nil, err
	}
	var list barchan.VolumeList
	if err := a.Live.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	objects := map[types.UID]bool{}
	for i := range list.Items {
		objects[list.Items[i].UID] = true
	}
	for _, dir := range dirs {
		if !objects[dir.UID] {
			found = append(found, adminclient.Finding{Where: adminclient.InFiles, What: "volume " + dir.Key().String(), Remedy: remedyVolume})
		}
	}
	return found, nil
}
